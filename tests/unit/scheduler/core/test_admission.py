"""The new-token ratio: how it falls, what a retraction teaches it, and what it lets in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission import DECAY_STEPS, INITIAL_RATIO, LOOK_AHEAD_STEPS, MIN_RATIO, NewTokenRatio


def test_it_falls_in_a_line_from_its_start_to_its_floor() -> None:
    ratio = NewTokenRatio()
    assert ratio.value == INITIAL_RATIO
    for _ in range(DECAY_STEPS // 2):
        ratio.on_decode_step()
    assert ratio.value == pytest.approx((INITIAL_RATIO + MIN_RATIO) / 2)
    for _ in range(DECAY_STEPS):
        ratio.on_decode_step()
    assert ratio.value == MIN_RATIO


def test_a_retraction_sets_it_from_the_progress_of_those_that_still_run() -> None:
    ratio = NewTokenRatio()
    ratio.on_retraction(num_generated_tokens=360, num_max_tokens=999, num_running=2)
    assert ratio.value == pytest.approx((360 + 2 * LOOK_AHEAD_STEPS) / 1000)
    ratio.on_decode_step()
    assert ratio.value == pytest.approx(0.4 - 0.001)


def test_it_expects_no_more_than_all_and_no_less_than_its_floor() -> None:
    ratio = NewTokenRatio()
    ratio.on_retraction(num_generated_tokens=100, num_max_tokens=100, num_running=1)
    assert ratio.value == 1.0
    ratio.on_retraction(num_generated_tokens=1, num_max_tokens=100_000, num_running=1)
    assert ratio.value == MIN_RATIO


def test_a_candidate_enters_while_what_it_takes_and_what_all_are_expected_to_need_is_free() -> None:
    ratio = NewTokenRatio()
    ratio.on_retraction(num_generated_tokens=480, num_max_tokens=999, num_running=1)
    assert ratio.value == 0.5
    assert ratio.fits(num_free_tokens=160, num_needed_tokens=32, num_remaining_tokens=256)
    assert not ratio.fits(num_free_tokens=159, num_needed_tokens=32, num_remaining_tokens=256)


@given(
    num_steps=st.integers(0, 1000),
    num_free_tokens=st.integers(0, 10**6),
    num_needed_tokens=st.integers(0, 10**6),
    num_remaining_tokens=st.integers(0, 10**6),
)
def test_who_enters_fits_by_the_plain_rule_and_still_does_when_less_is_expected(
    num_steps: int, num_free_tokens: int, num_needed_tokens: int, num_remaining_tokens: int
) -> None:
    ratio = NewTokenRatio()
    for _ in range(num_steps):
        ratio.on_decode_step()

    def fits() -> bool:
        return ratio.fits(
            num_free_tokens=num_free_tokens,
            num_needed_tokens=num_needed_tokens,
            num_remaining_tokens=num_remaining_tokens,
        )

    fitted = fits()
    assert not fitted or num_needed_tokens <= num_free_tokens
    ratio.on_decode_step()
    assert fits() or not fitted
