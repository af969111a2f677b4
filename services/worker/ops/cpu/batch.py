"""The inputs of a decode step on the CPU: in numpy, whose calls cost a fraction of torch's on columns this short."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from services.worker.ops import composed
from services.worker.ops.arguments import DecodeRows, SlotColumns


def advance_batch(columns: SlotColumns, slots: Tensor, rows: DecodeRows, *, block_size: int, num_blocks: int) -> None:
    """Advance the batch with numpy, or with torch if there are rows of padding."""
    if len(slots) < len(rows.token_ids):
        composed.advance_batch(columns, slots, rows, block_size=block_size, num_blocks=num_blocks)
        return
    index, tables = slots.numpy(), columns.block_tables.numpy()
    positions = columns.position.numpy()
    now = positions[index]
    positions[index] += 1
    rows.token_ids.numpy()[:] = columns.last_token.numpy()[index]
    rows.positions.numpy()[:] = now
    rows.draw_positions.numpy()[:] = rows.context_lens.numpy()[:] = now + 1
    rows.block_tables.numpy()[:, :num_blocks] = tables[index, :num_blocks]
    rows.slot_mapping.numpy()[:] = tables[index, now // block_size] * np.int64(block_size) + now % block_size
