"""No party fills the room that all share."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.tenants.fair_room import FairRoom, limit_of_party

STEPS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 6), st.booleans()), max_size=60)


@given(STEPS, st.integers(1, 20), st.integers(1, 60))
def test_whatever_parties_do_each_leaves_a_part_of_the_room_to_others(
    steps: list[tuple[str, int, bool]], limit: int, capacity: int
) -> None:
    room = FairRoom(limit, capacity=capacity)
    inside: dict[str, list[tuple[int, AbstractContextManager[None]]]] = {party: [] for party in "abcd"}
    for party, size, leaves in steps:
        if leaves and inside[party]:
            _, place = inside[party].pop()
            place.__exit__(None, None, None)
            continue
        num_own = sum(each for each, _ in inside[party])
        num_all = sum(each for places in inside.values() for each, _ in places)
        has_room = room.has_room(party, size)
        # One that has nothing is let in while there is any room.
        if num_own:
            num_free = capacity - num_all - size
            assert has_room == (num_own + size <= limit and num_own + size <= 4 * num_free)
        else:
            assert has_room == (num_all < capacity)
        if has_room:
            place = room.enter(party, size)
            place.__enter__()
            inside[party].append((size, place))
        assert {each: room.size_of(each) for each in inside} == {
            each: sum(size for size, _ in places) for each, places in inside.items()
        }


@pytest.mark.parametrize(("num_parties", "num_each"), [(1, 800), (2, 444), (5, 190)])
def test_parties_that_take_all_they_can_leave_room_for_another(num_parties: int, num_each: int) -> None:
    sizes = [0] * num_parties
    for _ in range(1000):
        for number, size in enumerate(sizes):
            if size + 1 <= limit_of_party(1000, capacity=1000, num_taken=sum(sizes) + 1):
                sizes[number] += 1
    assert sizes == pytest.approx([num_each] * num_parties, abs=2)
    assert sum(sizes) < 1000
