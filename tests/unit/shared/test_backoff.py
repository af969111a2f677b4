"""Delays between attempts that fail."""

from __future__ import annotations

from shared.backoff import Backoff


def test_delays_double_up_to_a_limit_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0, jitter=0.0)
    assert [backoff.next_delay_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_delay_s() == 0.5


def test_the_limit_holds_for_the_first_delay_too() -> None:
    backoff = Backoff(0.5, 0.1, jitter=0.0)
    assert [backoff.next_delay_s() for _ in range(2)] == [0.1, 0.1]


def test_delays_are_spread_over_the_part_that_is_random() -> None:
    assert Backoff(1.0, 8.0, draw=lambda: 0.0).next_delay_s() == 1.0
    assert Backoff(1.0, 8.0, draw=lambda: 0.5).next_delay_s() == 0.75
    assert Backoff(1.0, 8.0, draw=lambda: 1.0).next_delay_s() == 0.5


def test_clients_that_fail_together_do_not_return_together() -> None:
    first, second = Backoff(1.0, 8.0), Backoff(1.0, 8.0)
    delays = [(first.next_delay_s(), second.next_delay_s()) for _ in range(3)]
    assert all(0.5 * limit <= delay <= limit for limit, pair in zip((1, 2, 4), delays, strict=True) for delay in pair)
    assert all(mine != others for mine, others in delays)
