"""Finding the one among many that crashes, by trying halves of the suspects."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.bisection import Bisection, Group


def groups_of(bisection: Bisection[str]) -> list[str]:
    return ["".join(group.suspects) for group in bisection]


def test_a_crash_queues_its_halves_first() -> None:
    bisection: Bisection[str] = Bisection()
    assert bisection.crash("ABCDE", 1.0) is None
    assert groups_of(bisection) == ["ABC", "DE"]
    assert bisection.take() == Group(["A", "B", "C"], 1.0)
    assert bisection.crash("ABC", 2.0) is None
    assert groups_of(bisection) == ["AB", "C", "DE"]
    assert [group.since for group in bisection] == [2.0, 2.0, 1.0]


def test_a_crash_of_no_suspects_changes_nothing() -> None:
    bisection: Bisection[str] = Bisection()
    assert bisection.crash([], 0.0) is None
    assert bisection.next_group is None


def test_a_suspect_that_crashes_alone_twice_is_guilty_and_forgotten() -> None:
    bisection: Bisection[str] = Bisection()
    assert bisection.crash("A", 0.0) is None
    bisection.take()
    assert bisection.crash("A", 0.0) == "A"
    assert bisection.next_group is None
    assert bisection.crash("A", 0.0) is None


def test_a_suspect_that_is_put_back_is_tried_again_with_its_crashes_counted() -> None:
    bisection: Bisection[str] = Bisection()
    bisection.crash("A", 0.0)
    bisection.put_back(bisection.take().suspects, 3.0)
    assert bisection.take() == Group(["A"], 3.0)
    assert bisection.crash("A", 4.0) == "A"


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_cleared_suspect_starts_anew(is_waiting: bool) -> None:
    bisection: Bisection[str] = Bisection()
    bisection.crash("A", 0.0)
    if not is_waiting:
        bisection.take()
    bisection.clear({"A", "B"})
    assert bisection.next_group is None
    assert bisection.crash("A", 0.0) is None


def test_clearing_leaves_the_other_suspects_in_their_groups() -> None:
    bisection: Bisection[str] = Bisection()
    bisection.crash("ABCDEFGH", 1.0)
    bisection.clear({"A", "C", "E", "F", "G", "H"})
    assert groups_of(bisection) == ["BD"]


@given(st.integers(1, 300), st.data())
@settings(max_examples=200)
def test_the_guilty_one_is_known_after_few_crashes(count: int, data: st.DataObject) -> None:
    guilty = data.draw(st.integers(0, count - 1))
    bisection: Bisection[int] = Bisection()
    found = bisection.crash(range(count), 0.0)
    num_crashes = 1
    while found is None:
        tried = bisection.take().suspects
        if guilty in tried:
            found = bisection.crash(tried, 0.0)
            num_crashes += 1
        else:
            bisection.clear(set(tried))
    assert found == guilty
    assert num_crashes <= 2 + math.ceil(math.log2(count))
