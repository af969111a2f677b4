"""The kernel finds the places of runs as a plain loop over them would."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from services.worker.ops.triton.run_places import place_runs
from tests.support.kernels.run_batches import Run, RunBatch, run_batches

# Runs of one tile, of a tile and a tail, and of several tiles.
_LONG = [Run(0, 128, 0, 4000), Run(700, 129, 710, 760), Run(5, 300, 0, 305), Run(9, 1, 0, 3)]


def check(batch: RunBatch) -> None:
    rows = batch.rows()
    batch.check(rows, place_runs(rows, batch.num_tokens, block_size=batch.block_size, num_passes=batch.num_passes))


@pytest.mark.parametrize("num_passes", [0, 1, 2])
def test_long_runs_are_placed_in_their_rooms(num_passes: int) -> None:
    check(RunBatch(_LONG, block_size=16, num_passes=num_passes))


@given(batch=run_batches(most_tokens=5))
@settings(max_examples=8)
def test_runs_are_placed_in_their_rooms(batch: RunBatch) -> None:
    check(batch)
