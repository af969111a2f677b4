"""Makes the inputs of a decode step from the batch's columns, and advances its sequences: one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.arguments import DecodeRows, SlotColumns

_TILE = 256
# Only one: others might read a position after the first one has written it.
_NUM_WARPS = 1
# A kernel must not be compiled again because these have other values, or begin at other addresses.
_PER_STEP = ("table_width", "num_rows", "row_width", "num_blocks")
_COLUMNS = ("slots", "token_ids", "positions", "draw_positions", "slot_mapping")


@triton.jit(do_not_specialize=_PER_STEP, do_not_specialize_on_alignment=_COLUMNS)
def _advance_batch_kernel(
    last_token,
    position,
    tables,
    table_width,
    slots,
    num_rows,
    token_ids,
    positions,
    draw_positions,
    slot_mapping,
    context_lens,
    row_tables,
    row_width,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row; from `num_rows` on it is padding."""
    row = tl.program_id(0)
    is_sequence = row < num_rows
    slot = tl.load(slots + row, mask=is_sequence, other=0)
    now = tl.load(position + slot, mask=is_sequence, other=0)
    token_id = tl.load(last_token + slot, mask=is_sequence, other=0)
    table = tables + slot * table_width
    block_id = tl.load(table + now // BLOCK_SIZE, mask=is_sequence, other=0).to(tl.int64)
    following = tl.where(is_sequence, now + 1, 0)
    tl.store(position + slot, following, mask=is_sequence)
    tl.store(token_ids + row, token_id)
    tl.store(positions + row, now)
    tl.store(draw_positions + row, following)
    tl.store(slot_mapping + row, tl.where(is_sequence, block_id * BLOCK_SIZE + now % BLOCK_SIZE, -1))
    tl.store(context_lens + row, (now + 1).to(tl.int32))
    row_table = row_tables + row.to(tl.int64) * row_width
    # Padding reads only its first block.
    num_copied = tl.where(is_sequence, num_blocks, 1)
    for start in range(0, num_copied, TILE):
        places = start + tl.arange(0, TILE)
        block_ids = tl.load(table + places, mask=is_sequence & (places < num_copied), other=0)
        tl.store(row_table + places, block_ids, mask=places < num_copied)


def advance_batch(columns: SlotColumns, slots: Tensor, rows: DecodeRows, *, block_size: int, num_blocks: int) -> None:
    """Advance the batch with one kernel, which pads as well."""
    if not len(rows.token_ids):
        return
    _advance_batch_kernel[(len(rows.token_ids),)](
        columns.last_token,
        columns.position,
        columns.block_tables,
        columns.block_tables.shape[1],
        slots,
        len(slots),
        rows.token_ids,
        rows.positions,
        rows.draw_positions,
        rows.slot_mapping,
        rows.context_lens,
        rows.block_tables,
        rows.block_tables.shape[1],
        num_blocks,
        BLOCK_SIZE=block_size,
        TILE=_TILE,
        num_warps=_NUM_WARPS,
    )
