"""The new-token ratio: how it decays, how a retraction changes it, and what it admits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission import DECAY_STEPS, INITIAL_RATIO, LOOK_AHEAD_STEPS, MIN_RATIO, NewTokenRatio


def test_the_ratio_falls_linearly_from_its_start_to_its_floor() -> None:
    ratio = NewTokenRatio()
    assert ratio.value == INITIAL_RATIO
    for _ in range(DECAY_STEPS // 2):
        ratio.on_decode_step()
    assert ratio.value == pytest.approx((INITIAL_RATIO + MIN_RATIO) / 2)
    for _ in range(DECAY_STEPS):
        ratio.on_decode_step()
    assert ratio.value == MIN_RATIO


def test_a_retraction_sets_the_ratio_from_the_progress_of_the_remaining_sequences() -> None:
    ratio = NewTokenRatio()
    ratio.on_retraction(num_generated_tokens=360, num_max_tokens=999, num_running=2)
    assert ratio.value == pytest.approx((360 + 2 * LOOK_AHEAD_STEPS) / 1000)
    ratio.on_decode_step()
    assert ratio.value == pytest.approx(0.4 - 0.001)


def test_the_ratio_stays_between_its_floor_and_one() -> None:
    ratio = NewTokenRatio()
    ratio.on_retraction(num_generated_tokens=100, num_max_tokens=100, num_running=1)
    assert ratio.value == 1.0
    ratio.on_retraction(num_generated_tokens=1, num_max_tokens=100_000, num_running=1)
    assert ratio.value == MIN_RATIO


def test_a_sequence_is_admitted_while_its_need_and_the_expected_need_of_all_others_are_free() -> None:
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
def test_an_admitted_sequence_fits_the_plain_rule_and_still_fits_when_less_is_expected(
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
