"""The kernel makes the inputs of a decode step as a plain loop over its sequences would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.worker.ops.triton.advance_batch import advance_batch
from tests.support.kernels.decode_batches import DecodeBatch

every_batch = pytest.mark.parametrize(
    "batch",
    [
        DecodeBatch(num_slots=4, slots=[3, 0], block_size=2, max_length=1500),
        DecodeBatch(num_slots=8, slots=[5, 0, 7, 2], block_size=16, max_length=100),
        DecodeBatch(num_slots=3, slots=[1], block_size=1, max_length=40, seed=1),
        DecodeBatch(num_slots=2, slots=[], block_size=16, max_length=16),
    ],
    ids=["long", "some", "one", "none"],
)


@every_batch
@pytest.mark.parametrize("num_padded", [0, 1, 5])
def test_rows_are_made_from_the_columns_and_their_sequences_advance(batch: DecodeBatch, num_padded: int) -> None:
    columns, slots, rows = batch.columns(), batch.slot_column(), batch.spoilt_rows(len(batch.slots) + num_padded)
    before = replace(columns, position=columns.position.clone())
    advance_batch(columns, slots, rows, block_size=batch.block_size, num_blocks=batch.num_blocks)
    batch.check(before, columns, rows)
