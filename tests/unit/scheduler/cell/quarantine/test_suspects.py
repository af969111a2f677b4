"""Which requests are suspected of killing a worker, and how few deaths it takes to know."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.cell.quarantine.suspects import Suspects


def names(count: int) -> list[str]:
    return [f"r{number}" for number in range(count)]


def num_deaths_of(poison: str, request_ids: list[str], *, num_per_step: int) -> int:
    """Run trials until the poison is found; a trial runs its requests in steps of at most `num_per_step`."""
    suspects = Suspects()
    found = suspects.accuse(0, request_ids, 0.0)
    num_deaths = 1
    while found is None:
        trial = suspects.begin_trial(0)
        steps = [trial[start : start + num_per_step] for start in range(0, len(trial), num_per_step)]
        fatal = next((step for step in steps if poison in step), None)
        if fatal is None:
            suspects.clear(0, set(trial))
        else:
            found = suspects.accuse(0, fatal, 0.0)
            num_deaths += 1
        suspects.check_integrity()
    assert found == poison
    return num_deaths


@given(st.integers(1, 300), st.data())
@settings(max_examples=200)
def test_a_poison_is_found_after_few_deaths_wherever_it_is(count: int, data: st.DataObject) -> None:
    poison = data.draw(st.integers(0, count - 1))
    num_per_step = data.draw(st.integers(1, count))
    num_deaths = num_deaths_of(f"r{poison}", names(count), num_per_step=num_per_step)
    assert num_deaths <= 3 + math.log2(count)


@given(st.lists(st.lists(st.integers(0, 19), unique=True, max_size=20), max_size=12), st.data())
@settings(max_examples=200)
def test_a_suspect_is_in_one_group_whatever_happens(crashes: list[list[int]], data: st.DataObject) -> None:
    suspects = Suspects()
    for crash in crashes:
        domain = data.draw(st.integers(0, 2))
        held = {name for name in suspects.ids() if not suspects.is_tried_on(name, domain)}
        suspects.accuse(domain, [name for name in (f"r{number}" for number in crash) if name not in held], 0.0)
        suspects.check_integrity()
        if suspects.next_group is not None and domain not in suspects.trying_domains:
            suspects.begin_trial(domain)
        suspects.drop_ended(set(data.draw(st.lists(st.sampled_from(names(20)), max_size=2))))
        suspects.check_integrity()


def test_halves_are_tried_one_after_the_other_and_a_decode_step_clears() -> None:
    suspects = Suspects()
    assert suspects.accuse(0, names(5), 1.0) is None
    assert suspects.begin_trial(0) == ["r0", "r1", "r2"]
    suspects.clear(0, {"r0", "r2"})
    assert suspects.ids() == {"r1", "r3", "r4"}
    suspects.clear(0, {"r1"})
    assert suspects.trying_domains == []
    assert suspects.begin_trial(0) == ["r3", "r4"]
    suspects.clear(0, {"r3", "r4"})
    assert not suspects


def test_a_crash_accuses_the_requests_of_its_steps_and_the_rest_of_the_trial_waits_again() -> None:
    suspects = Suspects()
    suspects.accuse(0, names(8), 0.0)
    assert suspects.begin_trial(0) == ["r0", "r1", "r2", "r3"]
    assert suspects.accuse(0, ["r2", "r3"], 0.0) is None
    groups = []
    while suspects.next_group is not None:
        groups.append(suspects.begin_trial(0))
        suspects.clear(0, set(groups[-1]))
    assert groups == [["r2"], ["r3"], ["r0", "r1"], ["r4", "r5", "r6", "r7"]]


def test_a_death_between_steps_accuses_no_request_and_the_trial_is_made_again() -> None:
    suspects = Suspects()
    assert suspects.accuse(0, [], 0.0) is None
    assert not suspects
    suspects.accuse(0, ["a", "b"], 0.0)
    assert suspects.begin_trial(0) == ["a"]
    suspects.accuse(0, [], 0.0)
    assert suspects.begin_trial(0) == ["a"]


@pytest.mark.parametrize("decodes", [False, True])
def test_two_crashes_alone_are_poison_unless_a_decode_step_returned_in_between(decodes: bool) -> None:
    suspects = Suspects()
    assert suspects.accuse(0, ["a"], 0.0) is None
    suspects.begin_trial(0)
    if decodes:
        suspects.clear(0, {"a"})
    assert suspects.accuse(0, ["a"], 0.0) == (None if decodes else "a")
    assert ("a" in suspects) == decodes


def test_each_domain_tries_its_own_group() -> None:
    suspects = Suspects()
    suspects.accuse(0, names(4), 0.0)
    assert suspects.begin_trial(1) == ["r0", "r1"]
    assert suspects.begin_trial(0) == ["r2", "r3"]
    assert suspects.is_tried_on("r0", 1)
    assert not suspects.is_tried_on("r0", 0)
    suspects.accuse(1, ["r0", "r1"], 0.0)
    suspects.clear(0, {"r2", "r3"})
    assert suspects.ids() == {"r0", "r1"}


def test_a_request_that_ended_is_no_longer_a_suspect() -> None:
    suspects = Suspects()
    suspects.accuse(0, names(3), 0.0)
    suspects.begin_trial(0)
    suspects.drop_ended({"r0", "r2"})
    assert suspects.ids() == {"r1"}
    suspects.drop_ended({"r1"})
    assert not suspects
    assert suspects.trying_domains == []
