"""An outsider rebuilds what every rank's prefix cache holds from the events alone, at every step of a random run.

So it knows how much of any prompt the rank can use, with recurrent states too.
"""

from __future__ import annotations

import pytest

from tests.support.scheduler.kv_run import KvRun


def check_runs(seeds: range, num_actions: int) -> None:
    """Run seeds, in slices and in one go, and check that they met everything that changes a cache."""
    seen = [
        KvRun(seed, slices=slices, num_checkpoint_slots=6 if seed % 2 else None).run(num_actions)
        for seed in seeds
        for slices in (True, False)
    ]
    assert all(run.max_blocks > 20 for run in seen)
    counts = ("num_preemptions", "num_flushes", "num_losses", "num_not_finite", "num_late_checks")
    for name in (*counts, "num_states", "num_usable"):
        assert sum(getattr(run, name) for run in seen) > 0, name


def test_events_alone_rebuild_the_index_of_every_rank() -> None:
    check_runs(range(4), 400)


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_events_alone_rebuild_the_index_in_many_long_runs() -> None:
    check_runs(range(4, 104), 1500)
