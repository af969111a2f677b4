"""The cell under random faults: every request is answered once, and as if nothing had happened."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.faults import Fault
from tests.simulation.simulation import MIN_EVENTS, MIN_REQUESTS, SimulationError, simulate


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_seeds_end_well(first: int) -> None:
    for seed in range(first, first + 25):
        report = simulate(seed)
        assert report.num_requests >= MIN_REQUESTS
        assert report.num_events >= MIN_EVENTS


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 2200, 100))
def test_many_more_seeds_end_well(first: int) -> None:
    for seed in range(first, first + 100):
        simulate(seed)


def test_a_seed_replays_exactly() -> None:
    assert simulate(11) == simulate(11)


def test_every_kind_of_fault_happens() -> None:
    faults: Counter[Fault] = Counter()
    for seed in range(12):
        faults += simulate(seed, list(Fault)).faults
    # A full queue is a setting, not an incident.
    assert set(faults) == set(Fault) - {Fault.QUEUE_FULL}


def test_some_cells_draft_and_some_do_not() -> None:
    num_accepted_tokens = [simulate(seed, []).num_accepted_tokens for seed in range(8)]
    assert min(num_accepted_tokens) == 0
    assert max(num_accepted_tokens) > 100


def test_a_seed_that_fails_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.scheduler.Scheduler.finish", lambda *_: None)
    with pytest.raises(SimulationError, match="make simulate SEEDS=1 FIRST_SEED=3 FAULTS=cancel,deadline"):
        simulate(3, [Fault.DEADLINE, Fault.CANCEL])
