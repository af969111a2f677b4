"""Finds the places of runs of tokens in passes over them: one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.ops.arguments import RunPlaces, RunRows

_TILE = 128
_NUM_WARPS = 1
# A kernel must not be compiled again because these have other values, or begin at other addresses.
_PER_STEP = ("table_width", "num_rows", "num_tokens")
_COLUMNS = ("firsts", "starts", "stored_from", "ends", "tables", "positions", "slot_mapping", "context_lens")


@triton.jit(do_not_specialize=_PER_STEP, do_not_specialize_on_alignment=_COLUMNS)
def _place_runs_kernel(
    firsts,
    starts,
    stored_from,
    ends,
    tables,
    table_width,
    num_rows,
    num_tokens,
    positions,
    slot_mapping,
    context_lens,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row in one pass."""
    row, number = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + row), tl.load(starts + row + 1)
    first, last = tl.load(firsts + row) + number, tl.load(ends + row) - 1
    stored_first = tl.load(stored_from + row)
    table = tables + row.to(tl.int64) * table_width
    of_pass = number.to(tl.int64) * num_tokens
    for place in range(start, end, TILE):
        tokens = place + tl.arange(0, TILE)
        is_token = tokens < end
        wanted = first + (tokens - start)
        position = tl.minimum(wanted, last)
        block_id = tl.load(table + position // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        is_stored = (position == wanted) & (wanted >= stored_first)
        slot = tl.where(is_stored, block_id * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(positions + of_pass + tokens, position, mask=is_token)
        tl.store(slot_mapping + of_pass + tokens, slot, mask=is_token)
    context_len = tl.minimum(first + (end - start - 1), last) + 1
    tl.store(context_lens + number.to(tl.int64) * num_rows + row, context_len.to(tl.int32))


def place_runs(runs: RunRows, num_tokens: int, *, block_size: int, num_passes: int) -> RunPlaces:
    """Find the places with one kernel."""
    num_rows = len(runs.firsts)
    places = RunPlaces.empty(num_passes, num_tokens, num_rows, runs.firsts.device)
    if num_passes:
        _place_runs_kernel[(num_rows, num_passes)](
            runs.firsts,
            runs.starts,
            runs.stored_from,
            runs.ends,
            runs.block_tables,
            runs.block_tables.shape[1],
            num_rows,
            num_tokens,
            places.positions,
            places.slot_mapping,
            places.context_lens,
            BLOCK_SIZE=block_size,
            TILE=_TILE,
            num_warps=_NUM_WARPS,
        )
    return places
