"""Whom tokenizers blame when schedulers die again and again: shares of modelled runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.scheduler_deaths import Deaths, Plan, share_that_blames

# First tokens as late as schedulers live are the worst; earlier ones clear their requests.
OUTSIDE = {
    "early tokens": (Plan(1.0), 0.03),
    "late tokens": (Plan(4.0), 0.1),
    "latest tokens": (Plan(9.0), 0.25),
    "short lives": (Plan(9.0, mean_life_s=3.0), 0.1),
    "several replicas": (Plan(9.0, num_replicas=4), 0.35),
}
POISONS = {
    "one": Plan(4.0, num_deaths=0, num_poisons=1),
    "one of a replica among four": Plan(4.0, num_replicas=4, num_deaths=0, num_poisons=1),
    "two of two replicas": Plan(4.0, num_replicas=2, num_deaths=0, num_poisons=2),
    "late": Plan(9.0, num_replicas=4, num_deaths=0, num_poisons=1),
    "at once": Plan(1.0, num_replicas=4, num_deaths=0, num_poisons=2),
}


def check_outside(name: str, num_runs: int) -> None:
    plan, bound = OUTSIDE[name]
    assert share_that_blames(plan, num_runs) <= bound


def check_poisons(name: str, num_runs: int, *, num_dying_triers: int = 0) -> None:
    """Check that each poison is found, and no other request is blamed."""
    plan = replace(POISONS[name], num_dying_triers=num_dying_triers)
    for seed in range(num_runs):
        outcome = Deaths(plan, seed).run()
        assert (outcome.num_innocents, outcome.num_guilty) == (0, plan.num_poisons)
        assert not outcome.is_hopeless
        # Each poison takes its two accusations, its halves, two deaths alone, and one after its control.
        assert outcome.num_deaths <= 8 * plan.num_poisons + 2 * num_dying_triers


@pytest.mark.parametrize("name", OUTSIDE)
def test_deaths_of_another_cause_seldom_blame_a_request(name: str) -> None:
    check_outside(name, 60)


@pytest.mark.proof
@pytest.mark.parametrize("name", OUTSIDE)
def test_deaths_of_another_cause_seldom_blame_a_request_in_many_runs(name: str) -> None:
    check_outside(name, 2000)


@pytest.mark.parametrize("num_dying_triers", [0, 1])
@pytest.mark.parametrize("name", POISONS)
def test_with_one_trial_at_a_time_a_poison_is_found_and_no_request_of_another_replica_blamed(
    name: str, num_dying_triers: int
) -> None:
    check_poisons(name, 15, num_dying_triers=num_dying_triers)


@pytest.mark.proof
@pytest.mark.parametrize("num_dying_triers", [0, 1])
@pytest.mark.parametrize("name", POISONS)
def test_with_one_trial_at_a_time_a_poison_is_found_in_many_runs(name: str, num_dying_triers: int) -> None:
    check_poisons(name, 1000, num_dying_triers=num_dying_triers)


def test_replicas_that_try_side_by_side_blame_innocents_for_another_replicas_poison() -> None:
    """Why the scheduler gives out the trial: one of an older release does not."""
    assert share_that_blames(replace(POISONS["one of a replica among four"], is_granted=False), 20) > 0.5
