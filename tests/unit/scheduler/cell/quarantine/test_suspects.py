"""Which requests are suspected of killing a worker, and how few deaths it takes to know."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.cell.quarantine.suspects import Suspects
from services.scheduler.core.batch.sequence import RequestKey


def key(number: int) -> RequestKey:
    return RequestKey("default", f"r{number}")


def keys(*numbers: int) -> list[RequestKey]:
    return [key(number) for number in numbers]


def first_keys(count: int) -> list[RequestKey]:
    return keys(*range(count))


def num_deaths_of(poison: RequestKey, requests: list[RequestKey], *, num_per_step: int) -> int:
    """Run trials until the poison is found; a trial runs its requests in steps of at most `num_per_step`."""
    suspects = Suspects()
    found = suspects.accuse(0, requests, 0.0)
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
    num_deaths = num_deaths_of(key(poison), first_keys(count), num_per_step=num_per_step)
    assert num_deaths <= 3 + math.log2(count)


@given(st.lists(st.lists(st.integers(0, 19), unique=True, max_size=20), max_size=12), st.data())
@settings(max_examples=200)
def test_a_suspect_is_in_one_group_whatever_happens(crashes: list[list[int]], data: st.DataObject) -> None:
    suspects = Suspects()
    for crash in crashes:
        domain = data.draw(st.integers(0, 2))
        held = {one for one in suspects.all() if not suspects.is_tried_on(one, domain)}
        suspects.accuse(domain, [one for one in keys(*crash) if one not in held], 0.0)
        suspects.check_integrity()
        if suspects.next_group is not None and domain not in suspects.trying_domains:
            suspects.begin_trial(domain)
        suspects.drop_ended(set(data.draw(st.lists(st.sampled_from(first_keys(20)), max_size=2))))
        suspects.check_integrity()


def test_halves_are_tried_one_after_the_other_and_a_decode_step_clears() -> None:
    suspects = Suspects()
    assert suspects.accuse(0, first_keys(5), 1.0) is None
    assert suspects.begin_trial(0) == keys(0, 1, 2)
    suspects.clear(0, set(keys(0, 2)))
    assert suspects.all() == set(keys(1, 3, 4))
    suspects.clear(0, set(keys(1)))
    assert suspects.trying_domains == []
    assert suspects.begin_trial(0) == keys(3, 4)
    suspects.clear(0, set(keys(3, 4)))
    assert not suspects


def test_a_crash_accuses_the_requests_of_its_steps_and_the_rest_of_the_trial_waits_again() -> None:
    suspects = Suspects()
    suspects.accuse(0, first_keys(8), 0.0)
    assert suspects.begin_trial(0) == keys(0, 1, 2, 3)
    assert suspects.accuse(0, keys(2, 3), 0.0) is None
    groups = []
    while suspects.next_group is not None:
        groups.append(suspects.begin_trial(0))
        suspects.clear(0, set(groups[-1]))
    assert groups == [keys(2), keys(3), keys(0, 1), keys(4, 5, 6, 7)]


def test_a_death_between_steps_accuses_no_request_and_the_trial_is_made_again() -> None:
    suspects = Suspects()
    assert suspects.accuse(0, [], 0.0) is None
    assert not suspects
    suspects.accuse(0, keys(0, 1), 0.0)
    assert suspects.begin_trial(0) == keys(0)
    suspects.accuse(0, [], 0.0)
    assert suspects.begin_trial(0) == keys(0)


@pytest.mark.parametrize("decodes", [False, True])
def test_two_crashes_alone_are_poison_unless_a_decode_step_returned_in_between(decodes: bool) -> None:
    suspects = Suspects()
    assert suspects.accuse(0, keys(0), 0.0) is None
    suspects.begin_trial(0)
    if decodes:
        suspects.clear(0, {key(0)})
    assert suspects.accuse(0, keys(0), 0.0) == (None if decodes else key(0))
    assert (key(0) in suspects) == decodes


def test_each_domain_tries_its_own_group() -> None:
    suspects = Suspects()
    suspects.accuse(0, first_keys(4), 0.0)
    assert suspects.begin_trial(1) == keys(0, 1)
    assert suspects.begin_trial(0) == keys(2, 3)
    assert suspects.is_tried_on(key(0), 1)
    assert not suspects.is_tried_on(key(0), 0)
    suspects.accuse(1, keys(0, 1), 0.0)
    suspects.clear(0, set(keys(2, 3)))
    assert suspects.all() == set(keys(0, 1))


def test_a_request_that_ended_is_no_longer_a_suspect() -> None:
    suspects = Suspects()
    suspects.accuse(0, first_keys(3), 0.0)
    suspects.begin_trial(0)
    suspects.drop_ended(set(keys(0, 2)))
    assert suspects.all() == set(keys(1))
    suspects.drop_ended(set(keys(1)))
    assert not suspects
    assert suspects.trying_domains == []
