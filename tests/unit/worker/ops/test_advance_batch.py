"""The inputs of a decode step equal those of a plain loop over its sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.worker.ops import BACKEND_NAMES, load_ops
from tests.support.kernels.decode_batches import DecodeBatch

every_batch = pytest.mark.parametrize(
    "batch",
    [
        DecodeBatch(num_slots=8, slots=[5, 0, 7, 2], block_size=16, max_length=100),
        DecodeBatch(num_slots=3, slots=[1], block_size=1, max_length=40, seed=1),
        DecodeBatch(num_slots=600, slots=list(range(599, 87, -1)), block_size=4, max_length=5, seed=2),
        DecodeBatch(num_slots=2, slots=[], block_size=16, max_length=16),
    ],
    ids=["some", "one", "many", "none"],
)


@every_batch
@pytest.mark.parametrize("num_padded", [0, 1, 5])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_rows_are_made_from_the_columns_and_their_sequences_advance(
    backend: str, batch: DecodeBatch, num_padded: int
) -> None:
    columns, slots, rows = batch.columns(), batch.slot_column(), batch.spoilt_rows(len(batch.slots) + num_padded)
    before = replace(columns, position=columns.position.clone())
    load_ops(backend).advance_batch(columns, slots, rows, block_size=batch.block_size, num_blocks=batch.num_blocks)
    batch.check(before, columns, rows)
