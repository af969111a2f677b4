"""The largest logit of each row, in parts that run side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.triton.sampling.ordering import NO_RANK, column_of, ranked, value_of

TILE, NUM_WARPS = 8192, 8
"""Columns of a program: eight loads of 16 bytes per thread. 19 programs then read a row of 150,000 columns."""


@triton.jit
def _peak_kernel(logits, row_stride, peaks, num_columns, TILE: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    places = logits + row.to(tl.int64) * row_stride + columns
    x = tl.load(places, mask=columns < num_columns, other=float("-inf"))
    tl.store(peaks + row * tl.num_programs(1) + tile, tl.max(ranked(x, columns)))


@triton.jit
def _largest_kernel(peaks, token_ids, largest, num_tiles, TILES: tl.constexpr):
    row, tiles = tl.program_id(0), tl.arange(0, TILES)
    peak = tl.max(tl.load(peaks + row * num_tiles + tiles, mask=tiles < num_tiles, other=NO_RANK))
    tl.store(token_ids + row, column_of(peak).to(tl.int64))
    tl.store(largest + row, value_of(peak))


def greedy_sample(logits: Tensor, *, tile: int = TILE, num_warps: int = NUM_WARPS) -> tuple[Tensor, Tensor]:
    """See `Ops.greedy_sample`. Of equal logits, zeros of either sign among them, the lowest column's is taken.

    Args:
        logits: [B, vocabulary] float32, rows contiguous; not written.
        tile: Columns of a program, a power of two.
    """
    num_rows, num_columns = logits.shape
    num_tiles = triton.cdiv(num_columns, tile)
    peaks = torch.empty(num_rows, num_tiles, dtype=torch.int64, device=logits.device)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    largest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _peak_kernel[(num_rows, num_tiles)](logits, logits.stride(0), peaks, num_columns, TILE=tile, num_warps=num_warps)
    _largest_kernel[(num_rows,)](
        peaks, token_ids, largest, num_tiles, TILES=triton.next_power_of_2(num_tiles), num_warps=1
    )
    return token_ids, largest
