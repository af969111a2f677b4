"""Arranges the rows of a step by expert, on the device: each expert's rows fill whole tiles of a grouped product.

A pair is a token and one of its experts, so T tokens with k experts each have T * k pairs:

    pair                0  1  2  3  4  5            k = 2
    its expert          2  0  2  1  0  2
    rows by expert      1  4  |  3  -  |  0  2  |  5  -  |  -  -        tiles of 2 rows; a dash is padding
    tiles' experts      0        1        2        2        none

The number of tiles depends only on shapes, so a graph can hold the launches. Pairs are counted, not sorted, in their
own order and without atomics, so equal steps have equal rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs that a program reads at a time.
_PAIRS = 1024
_NUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class ExpertRuns:
    """Pairs in tiles of one expert."""

    tile_rows: int
    pairs: Tensor
    """[num_tiles * tile_rows] int32: pairs by expert; T * k for padding."""
    tile_experts: Tensor
    """[num_tiles] int32: each tile's expert; the number of experts for a tile that is not used, whose `pairs` are
    undefined."""

    @property
    def num_tiles(self) -> int:
        """The number of tiles, with those that are not used."""
        return self.tile_experts.shape[0]


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["expert_ids"])
def _count_pairs_kernel(expert_ids, counts, num_pairs, PAIRS: tl.constexpr):
    expert = tl.program_id(0)
    found = tl.full((PAIRS,), 0, tl.int32)
    for first in range(0, num_pairs, PAIRS):
        pairs = first + tl.arange(0, PAIRS)
        ids = tl.load(expert_ids + pairs, mask=pairs < num_pairs, other=-1)
        found += (ids == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_tiles"], do_not_specialize_on_alignment=["expert_ids"])
def _arrange_pairs_kernel(
    expert_ids,
    counts,
    arranged,
    tile_experts,
    num_pairs,
    num_experts,
    num_tiles,
    TILE_ROWS: tl.constexpr,
    MOST_EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    # The last program has no expert; the tiles after all others are its own.
    expert = tl.program_id(0)
    experts = tl.arange(0, MOST_EXPERTS)
    tiles = tl.cdiv(tl.load(counts + experts, mask=experts < num_experts, other=0), TILE_ROWS)
    first_tile = tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
    end_tile = tl.where(expert < num_experts, tl.sum(tl.where(experts <= expert, tiles, 0), axis=0), num_tiles)
    for first in range(first_tile, end_tile, PAIRS):
        places = first + tl.arange(0, PAIRS)
        tl.store(tile_experts + places, expert, mask=places < end_tile)
    if expert == num_experts:
        return
    place = first_tile * TILE_ROWS
    for first in range(0, num_pairs, PAIRS):
        pairs = first + tl.arange(0, PAIRS)
        ids = tl.load(expert_ids + pairs, mask=pairs < num_pairs, other=-1)
        is_own = (ids == expert).to(tl.int32)
        places = place + tl.cumsum(is_own, axis=0) - 1
        tl.store(arranged + places, pairs, mask=is_own > 0)
        place += tl.sum(is_own, axis=0)
    padding = place + tl.arange(0, TILE_ROWS)
    tl.store(arranged + padding, num_pairs, mask=padding < end_tile * TILE_ROWS)


def arrange_pairs(expert_ids: Tensor, num_experts: int, tile_rows: int) -> ExpertRuns:
    """Arrange the pairs of `expert_ids` [T, k] int32, contiguous; one whose expert does not exist is left out.

    Args:
        num_experts: At least 1.
        tile_rows: A power of two.
    """
    num_pairs, device = expert_ids.numel(), expert_ids.device
    # Each expert with pairs has at most one tile that is not full.
    num_tiles = num_pairs // tile_rows + min(num_experts, num_pairs)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    pairs = torch.empty(num_tiles * tile_rows, dtype=torch.int32, device=device)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=device)
    _count_pairs_kernel[(num_experts,)](expert_ids, counts, num_pairs, PAIRS=_PAIRS, num_warps=_NUM_WARPS)
    _arrange_pairs_kernel[(num_experts + 1,)](
        expert_ids,
        counts,
        pairs,
        tile_experts,
        num_pairs,
        num_experts,
        num_tiles,
        TILE_ROWS=tile_rows,
        MOST_EXPERTS=triton.next_power_of_2(num_experts),
        PAIRS=_PAIRS,
        num_warps=_NUM_WARPS,
    )
    return ExpertRuns(tile_rows, pairs, tile_experts)
