"""Coupled ranks under one scheduler against ATOM's rules: fewer dummy steps, and no less throughput."""

from __future__ import annotations

import pytest

from services.scheduler.core.policy import SchedulerPolicy
from tests.simulation.coupled_cells import LOADS, Arrival, Load, run_atom, run_ours

POLICY = SchedulerPolicy(
    max_num_seqs=64, max_num_batched_tokens=4096, enable_mixed_steps=False, max_prefill_wait_steps=2
)
SEEDS = (1, 2, 3)
# Bursts of twice as many requests as ranks are spread evenly by round robin already, so there is nothing to gain.
COMPARED_LOADS = [load for load in LOADS if not load.name.startswith("bursts")]


def compare(load: Load, seeds: tuple[int, ...]) -> None:
    loads = [load.draw(seed) for seed in seeds]
    ours = [run_ours(arrivals, 4, POLICY) for arrivals in loads]
    atom = [run_atom(arrivals, 4, POLICY) for arrivals in loads]
    assert sum(one.num_tokens for one in ours) == sum(one.num_tokens for one in atom)
    assert sum(one.num_dummies for one in ours) < sum(one.num_dummies for one in atom)
    # Below saturation both serve requests as they arrive, so neither is faster.
    assert sum(one.duration_s for one in ours) < 1.002 * sum(one.duration_s for one in atom)


@pytest.mark.parametrize("load", COMPARED_LOADS, ids=lambda load: load.name)
def test_one_scheduler_runs_fewer_dummies_than_ranks_that_vote(load: Load) -> None:
    compare(load, SEEDS[1:])


@pytest.mark.proof
@pytest.mark.parametrize("load", COMPARED_LOADS, ids=lambda load: load.name)
def test_so_it_does_on_more_loads(load: Load) -> None:
    compare(load, SEEDS)


def test_one_scheduler_is_faster_at_saturation() -> None:
    (load,) = [load for load in LOADS if load.name == "all at once"]
    loads = [load.draw(seed) for seed in SEEDS]
    ours_s = sum(run_ours(arrivals, 4, POLICY).duration_s for arrivals in loads)
    assert ours_s < sum(run_atom(arrivals, 4, POLICY).duration_s for arrivals in loads)


def test_one_request_makes_all_ranks_but_its_own_run_dummies() -> None:
    arrivals = [Arrival(0.0, bytes(4 * 8), 10)]
    for outcome in (run_ours(arrivals, 4, POLICY), run_atom(arrivals, 4, POLICY)):
        assert (outcome.num_rank_steps, outcome.num_dummies, outcome.num_tokens) == (40, 30, 10)
