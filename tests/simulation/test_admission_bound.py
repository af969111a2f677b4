"""The bound on the steps that an aged request waits."""

from __future__ import annotations

from tests.simulation.watches.admission_bound import max_steps_to_admission


def test_the_waiting_time_is_bounded_by_the_requests_ahead() -> None:
    assert max_steps_to_admission(0, 4096, 16384) == 0
    # A prompt takes one step: each step returns one token of a request ahead.
    assert max_steps_to_admission(3, 4096, 4096) == 3 * 4096
    assert max_steps_to_admission(3, 4096, 1024) == 3 * 4096 * 7
    # Chunks that end where two states are saved.
    assert max_steps_to_admission(3, 4096, 1024, 2) == 3 * 4096 * 11
