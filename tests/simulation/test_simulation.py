"""The cell under random faults: every request is answered once, with the same answer as without faults."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Iterable
from functools import cache
from random import Random

import pytest

from services.scheduler.core.batch.slot_table import RUN_TOKENS
from tests.simulation.faults import DRAINS, Fault, FaultMix
from tests.simulation.simulation import MIN_EVENTS, MIN_REQUESTS, Report, SimulationError, simulate


@cache
def run_undisturbed(seed: int) -> Report:
    """What happens without faults."""
    return simulate(seed, [])


@pytest.mark.parametrize("first", [0, 10])
def test_seeds_end_well(first: int) -> None:
    for seed in range(first, first + 10):
        report = simulate(seed)
        assert report.num_requests >= MIN_REQUESTS
        assert report.num_events >= MIN_EVENTS


# For any number of seeds: `make simulate`.
@pytest.mark.slow
@pytest.mark.parametrize("first", [20, *(pytest.param(first, marks=pytest.mark.proof) for first in range(45, 170, 25))])
def test_more_seeds_end_well(first: int) -> None:
    for seed in range(first, first + 25):
        simulate(seed)


OF_ONE_KIND: dict[str, Iterable[Fault]] = {
    "drains": DRAINS,
    "schedulers that flap": [Fault.SCHEDULER_FLAP],
    "another model": [Fault.MODEL_CHANGE],
    "long steps": [Fault.LONG_STEP],
    "kills from outside": [Fault.WORKER_CRASH, Fault.LINK_BREAK],
    "full queues": [Fault.QUEUE_FULL],
    "repeated ids": [Fault.SAME_ID],
    "long answers": [Fault.LONG_ANSWER],
    "nothing": [],
}


# Of kinds that tests below have a few seeds of.
@pytest.mark.proof
@pytest.mark.parametrize("kinds", OF_ONE_KIND.values(), ids=OF_ONE_KIND.keys())
def test_more_seeds_of_one_kind_end_well(kinds: Iterable[Fault]) -> None:
    for seed in range(24):
        simulate(seed, [*kinds])


# The second seed has TP groups.
@pytest.mark.parametrize("seed", [11, 20])
def test_a_seed_replays_exactly(seed: int) -> None:
    assert simulate(seed) == simulate(seed)


def test_every_kind_of_fault_happens() -> None:
    # A full queue is a setting of the cell, not a fault that strikes.
    unseen = set(Fault) - {Fault.QUEUE_FULL}
    # The first ones show all, as long as the cell runs as it does.
    for seed in (33, 37, 18, 22, 2, 23, *range(100)):
        unseen -= simulate(seed, list(Fault)).faults.keys()
        if not unseen:
            return
    pytest.fail(f"100 seeds do not show {unseen}")


@pytest.mark.parametrize("others", [[], [Fault.WORKER_SICK, Fault.WORKER_CRASH, Fault.SCHEDULER_RESTART]])
def test_requests_wait_for_lost_workers_as_long_as_the_operator_lets_them(others: list[Fault]) -> None:
    ends: Counter[str] = Counter()
    for seed in range(6):
        ends += simulate(seed, [Fault.WORKERS_GONE, *others]).ends
    # Some ends are errors, which the watch has looked at; after the absence all is served again.
    assert ends["WORKERS_LOST"] > 5
    assert ends["max_tokens"] > 5


def test_ranks_that_come_back_with_less_room_serve_all_that_fits() -> None:
    num_deaths = 0
    for seed in range(4):
        report = simulate(seed, [Fault.UNEQUAL_POOLS, Fault.WORKER_CRASH, Fault.SCHEDULER_RESTART])
        assert not report.ends["KV_CAPACITY_EXCEEDED"]
        num_deaths += report.num_deaths
    assert num_deaths


def test_a_poison_request_halves_its_suspects_with_each_death() -> None:
    num_poisoned = 0
    for seed in range(8):
        report = simulate(seed, [Fault.POISON])
        # Only one request of a run is poison, and nothing else kills.
        assert report.ends["POISON_REQUEST"] == (report.num_deaths > 0)
        num_poisoned += report.ends["POISON_REQUEST"]
        if report.num_deaths:
            assert report.num_deaths <= 3 + math.log2(report.num_suspects)
    assert num_poisoned > 5


def check_sick(seeds: range, kinds: list[Fault]) -> None:
    """No request ends for what is wrong with workers, and all requests end."""
    num_deaths = 0
    for seed in seeds:
        report = simulate(seed, kinds)
        num_deaths += report.num_deaths
        assert not report.ends["POISON_REQUEST"]
    assert num_deaths > len(seeds)


def test_sick_workers_poison_no_request() -> None:
    check_sick(range(5), [Fault.WORKER_SICK, Fault.ATTACH_SICK])


@pytest.mark.proof
@pytest.mark.parametrize("others", [[], [Fault.ATTACH_SICK], [Fault.ATTACH_SICK, *DRAINS], [Fault.POISON]])
def test_workers_that_are_sick_in_many_ways_poison_no_request(others: list[Fault]) -> None:
    # A request that is poison ends as one, which the check of each answer knows.
    if others == [Fault.POISON]:
        assert all(simulate(seed, [Fault.WORKER_SICK, *others]) for seed in range(60))
    else:
        check_sick(range(60), [Fault.WORKER_SICK, *others])


def test_kills_from_outside_poison_no_request_that_gets_a_token_in_between() -> None:
    num_lost, kinds = 0, [Fault.WORKER_CRASH, Fault.LINK_BREAK]
    # Known before a run, which begins with this draw.
    for seed in (seed for seed in range(24) if FaultMix.draw(Random(seed), kinds).spares_suspects):
        report = simulate(seed, kinds)
        assert report.spares_suspects
        num_lost += report.num_attaches - report.dp_size
        assert not report.ends["POISON_REQUEST"]
    assert num_lost > 10


def test_schedulers_that_die_right_after_they_are_ready_poison_no_request() -> None:
    num_controls = 0
    for seed in range(4, 8):
        report = simulate(seed, [Fault.SCHEDULER_FLAP])
        num_controls += report.num_controls
        assert not report.ends["POISON_REQUEST"]
    assert num_controls > 3


def test_a_change_of_the_model_ends_what_waits_and_continues_nothing_with_other_weights() -> None:
    num_changed = num_schedulers = 0
    for seed in range(5, 11):
        report = simulate(seed, [Fault.MODEL_CHANGE])
        num_changed += report.ends["MODEL_CHANGED"]
        num_schedulers += report.num_schedulers - 1
    assert min(num_changed, num_schedulers) > 2


def test_planned_stops_are_no_losses_and_accuse_no_request() -> None:
    num_left = num_crashed = 0
    for seed in range(4):
        report = simulate(seed, DRAINS)
        num_left += report.num_attaches - report.dp_size
        assert (report.num_lost_epochs, report.num_suspects, report.ends["POISON_REQUEST"]) == (0, 0, 0)
    # The watch checks that only the crashes among them count.
    for seed in range(4):
        kinds = [*DRAINS, Fault.WORKER_CRASH, Fault.SCHEDULER_RESTART, Fault.SCHEDULER_ZOMBIE, Fault.MEMBER_CRASH]
        report = simulate(seed, kinds)
        num_crashed += report.num_lost_epochs
    assert min(num_left, num_crashed) > 10


def test_a_merely_long_step_ends_no_epoch() -> None:
    num_long_steps = 0
    for seed in range(4, 8):
        report = simulate(seed, [Fault.LONG_STEP])
        num_long_steps += report.faults[Fault.LONG_STEP]
        assert report.num_attaches == report.dp_size
    assert num_long_steps > 5


def test_coupled_cells_run_dummies_and_others_none() -> None:
    reports = [run_undisturbed(seed) for seed in range(3)]
    assert any(report.num_dummy_steps for report in reports)
    assert all(report.is_coupled for report in reports if report.num_dummy_steps)


def test_tenants_are_refused_at_their_limits_and_repeat_each_others_ids() -> None:
    limited = [simulate(seed, [Fault.QUEUE_FULL]).ends for seed in range(4)]
    assert sum(ends["TENANT_LIMIT"] for ends in limited) > 20
    assert not all(ends["TENANT_LIMIT"] for ends in limited)
    # The watch checks that only those of the same tenant are duplicates.
    repeated = [simulate(seed, [Fault.SAME_ID]) for seed in range(4, 6)]
    assert sum(report.ends["DUPLICATE_REQUEST"] for report in repeated) > 0
    assert sum(report.faults[Fault.SAME_ID] for report in repeated) > 10


def test_some_cells_draft_and_some_do_not() -> None:
    num_accepted_tokens = [run_undisturbed(seed).num_accepted_tokens for seed in range(3)]
    assert min(num_accepted_tokens) == 0
    assert max(num_accepted_tokens) > 100


def test_some_answers_are_so_long_that_their_tokens_come_round() -> None:
    longest = [simulate(seed, [Fault.LONG_ANSWER]).max_completion_tokens for seed in range(4, 6)]
    assert min(longest) < RUN_TOKENS
    assert max(longest) > 2 * RUN_TOKENS


def test_a_seed_that_fails_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.core.results.endings.Endings.finish", lambda *_: None)
    with pytest.raises(SimulationError, match="make simulate SEEDS=1 FIRST_SEED=3 FAULTS=cancel,deadline"):
        simulate(3, [Fault.DEADLINE, Fault.CANCEL])


def test_a_bug_that_the_scheduler_would_end_by_fails_the_seed_and_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr("services.scheduler.server.cell_server.encode_outputs", fail)
    with pytest.raises(SimulationError) as failure:
        simulate(0, [Fault.SCHEDULER_RESTART])
    bug = failure.value.__cause__
    assert isinstance(bug, KeyError)
    assert "_perform" in [frame.name for frame in traceback.extract_tb(bug.__traceback__)]
