"""Deadlines pass in order; discarded ones never do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.cell.requests.deadlines import Deadlines


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60), st.integers(0, 9))
def test_passed_deadlines_are_returned_earliest_first_unless_discarded(
    requests: list[tuple[int, bool]], now: int
) -> None:
    deadlines = Deadlines()
    kept: dict[tuple[int, int], int] = {}
    for handle, (deadline, is_forgotten) in enumerate(requests):
        deadlines.add((1, handle), deadline)
        kept[1, handle] = deadline
        if is_forgotten:
            deadlines.discard((1, handle))
            del kept[1, handle]
    assert deadlines.first == min(kept.values(), default=None)
    passed = deadlines.pop_passed(now)
    assert [kept[key] for key in passed] == sorted(deadline for deadline in kept.values() if deadline <= now)
    assert len(deadlines) == len(kept) - len(passed)
    assert deadlines.pop_passed(now) == []


def test_discarding_a_request_without_a_deadline_does_nothing() -> None:
    deadlines = Deadlines()
    deadlines.discard((1, 1))
    assert (len(deadlines), deadlines.first) == (0, None)


def test_a_handle_can_be_reused_with_another_deadline() -> None:
    deadlines = Deadlines()
    deadlines.add((1, 1), 5.0)
    deadlines.discard((1, 1))
    deadlines.add((1, 1), 9.0)
    assert deadlines.pop_passed(6.0) == []
    assert deadlines.pop_passed(9.0) == [(1, 1)]


def test_short_requests_with_long_deadlines_leave_no_entries() -> None:
    deadlines = Deadlines()
    for handle in range(10_000):
        deadlines.add((1, handle), 3600.0 + handle)
        deadlines.discard((1, handle))
    assert len(deadlines._heap) < 200
