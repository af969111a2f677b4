"""The places of runs of tokens equal those of a plain loop over them."""

from __future__ import annotations

import pytest
from hypothesis import given

from services.worker.ops import BACKEND_NAMES, load_ops
from tests.support.kernels.run_batches import Run, RunBatch, run_batches


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@given(batch=run_batches(most_tokens=20))
def test_runs_are_placed_in_their_rooms(backend: str, batch: RunBatch) -> None:
    rows = batch.rows()
    places = load_ops(backend).place_runs(
        rows, batch.num_tokens, block_size=batch.block_size, num_passes=batch.num_passes
    )
    batch.check(rows, places)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_a_token_outside_of_its_room_is_not_stored(backend: str) -> None:
    batch = RunBatch([Run(first=3, length=4, stored_from=4, end=6)], block_size=4, num_passes=2)
    rows = batch.rows()
    slot = 4 * int(rows.block_tables[0, 1])
    places = load_ops(backend).place_runs(rows, 4, block_size=4, num_passes=2)
    assert places.positions.tolist() == [[3, 4, 5, 5], [4, 5, 5, 5]]
    assert places.slot_mapping.tolist() == [[-1, slot, slot + 1, -1], [slot, slot + 1, -1, -1]]
    assert places.context_lens.tolist() == [[6], [6]]
