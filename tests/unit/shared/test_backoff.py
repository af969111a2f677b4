"""Delays between attempts that fail."""

from __future__ import annotations

from services.scheduler.discovery.backoff import FIRST_DELAY_S, MAX_DELAY_S, Backoff


def test_delays_double_up_to_a_limit_and_begin_again_after_a_success() -> None:
    backoff = Backoff(lambda: 1.0)
    delays = [backoff.next_delay_s() for _ in range(10)]
    assert delays[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert delays[-1] == MAX_DELAY_S
    backoff.reset()
    assert backoff.next_delay_s() == FIRST_DELAY_S


def test_delays_are_spread_over_half_of_their_range() -> None:
    assert Backoff(lambda: 0.0).next_delay_s() == FIRST_DELAY_S / 2
