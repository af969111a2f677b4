"""Log-probabilities of tokens on the device, as `drawing.row_logprobs`.

Each row is read once, in tiles whose sums are added up in a fixed order, so that a row's bytes do not depend on its
batch. The likeliest tokens are looked for in the few groups of columns that can hold them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.triton.sampling.group_choice import cut_of_top_k, group_keys, list_groups
from services.worker.ops.triton.sampling.ordering import NO_RANK, column_of, ranked, value_of
from services.worker.ops.triton.sampling.row_scan import GROUP, TILE

_CHUNK = 32


@triton.jit(do_not_specialize=["num_own"], do_not_specialize_on_alignment=["token_ids"])
def _measure_kernel(
    logits,
    row_stride,
    token_ids,
    tile_maxima,
    tile_sums,
    tile_counts,
    group_maxima,
    num_own,
    num_columns,
    num_groups,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, tile = tl.program_id(0), tl.program_id(1)
    logits_row = logits + row.to(tl.int64) * row_stride
    columns = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_row + columns, mask=columns < num_columns, other=float("-inf"))
    largest = tl.max(x)
    weights = tl.exp(x - tl.where(largest > float("-inf"), largest, 0.0))
    place = row * tl.num_programs(1) + tile
    tl.store(tile_maxima + place, largest)
    tl.store(tile_sums + place, tl.sum(weights.to(tl.float64)))
    for number in range(num_own):
        token_id = tl.load(token_ids + row * num_own + number)
        own = tl.load(logits_row + token_id)
        is_before = (x > own) | ((x == own) & (columns < token_id))
        tl.store(tile_counts + place * num_own + number, tl.sum(is_before.to(tl.int32)))
    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    maxima = tl.max(tl.reshape(x, [TILE // GROUP, GROUP]), axis=1)
    tl.store(group_maxima + row * num_groups + groups, maxima, mask=groups < num_groups)


@triton.jit(do_not_specialize=["num_top"])
def _choose_top_kernel(group_maxima, groups, group_counts, num_top, num_groups, GROUPS: tl.constexpr):
    row = tl.program_id(0)
    keys = group_keys(group_maxima, row, num_groups, GROUPS)
    list_groups(keys, cut_of_top_k(keys, num_top), num_groups, groups + row * num_groups, group_counts + row, GROUPS)


@triton.jit
def _ranks(logits_row, groups, start, num_chosen, num_columns, CHUNK: tl.constexpr, GROUP: tl.constexpr):
    """The `ranked` of the entries of CHUNK listed groups; `NO_RANK` past the last."""
    places = start + tl.arange(0, CHUNK)
    group = tl.load(groups + places, mask=places < num_chosen, other=0)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_entry = (columns < num_columns) & (places < num_chosen)[:, None]
    ranks = ranked(tl.load(logits_row + columns, mask=is_entry, other=0.0), columns)
    return tl.where(is_entry, ranks, NO_RANK)


@triton.jit
def _largest_below(ranks, below):
    return tl.max(tl.where(ranks < below, ranks, NO_RANK))


@triton.jit(do_not_specialize=["num_own", "num_top"], do_not_specialize_on_alignment=["token_ids"])
def _finish_kernel(
    logits,
    row_stride,
    token_ids,
    tile_maxima,
    tile_sums,
    tile_counts,
    groups,
    group_counts,
    entries,
    values,
    ranks,
    num_own,
    num_top,
    num_columns,
    num_groups,
    num_tiles,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row, tiles = tl.program_id(0), tl.arange(0, TILES)
    logits_row = logits + row.to(tl.int64) * row_stride
    is_tile = tiles < num_tiles
    places = row * num_tiles + tiles
    maxima = tl.load(tile_maxima + places, mask=is_tile, other=float("-inf"))
    largest = tl.max(maxima)
    sums = tl.load(tile_sums + places, mask=is_tile, other=0.0)
    log_total = tl.log(tl.sum(sums * tl.exp(maxima.to(tl.float64) - largest.to(tl.float64))))
    entry = row * (num_own + num_top)
    for number in range(num_own):
        counts = tl.load(tile_counts + places * num_own + number, mask=is_tile, other=0)
        tl.store(ranks + row * num_own + number, 1 + tl.sum(counts))
        token_id = tl.load(token_ids + row * num_own + number)
        own = tl.load(logits_row + token_id)
        tl.store(entries + entry + number, token_id.to(tl.int32))
        tl.store(values + entry + number, ((own - largest).to(tl.float64) - log_total).to(tl.float32))
    if num_top > 0:
        num_chosen = tl.load(group_counts + row)
        chosen = groups + row * num_groups
        # Normally all there are.
        first = _ranks(logits_row, chosen, 0, num_chosen, num_columns, CHUNK, GROUP)
        rank = tl.full([], 2**63 - 1, tl.int64)
        for place in range(num_own, num_own + num_top):
            best = _largest_below(first, rank)
            for start in range(CHUNK, num_chosen, CHUNK):
                others = _ranks(logits_row, chosen, start, num_chosen, num_columns, CHUNK, GROUP)
                best = tl.maximum(best, _largest_below(others, rank))
            rank = best
            tl.store(entries + entry + place, column_of(rank))
            tl.store(values + entry + place, ((value_of(rank) - largest).to(tl.float64) - log_total).to(tl.float32))


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of some tokens per row, and of each row's likeliest ones, likeliest first.

    Args:
        logits: [B, vocabulary] float32, rows contiguous, the largest of each row finite; not written.
        token_ids: [B, M] int64, contiguous, M at least 1: each row's own tokens.
        num_top: How many of the likeliest tokens follow the row's own, at least 0; ties go to the lower id.

    Returns:
        (token ids [B, M + n] int32, their log-probabilities [B, M + n] float32, ranks of the rows' own tokens [B, M]
        int32, from 1), where n is `num_top` or, if smaller, the vocabulary's size.
    """
    (num_rows, num_columns), num_own = logits.shape, token_ids.shape[1]
    num_top = min(num_top, num_columns)
    num_tiles, num_groups = triton.cdiv(num_columns, TILE), triton.cdiv(num_columns, GROUP)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=logits.device)

    tile_maxima, tile_sums = empty(num_tiles, dtype=torch.float32), empty(num_tiles, dtype=torch.float64)
    tile_counts, group_maxima = empty(num_tiles, num_own, dtype=torch.int32), empty(num_groups, dtype=torch.float32)
    groups, group_counts = empty(num_groups, dtype=torch.int32), empty(dtype=torch.int32)
    width = num_own + num_top
    entries, values = empty(width, dtype=torch.int32), empty(width, dtype=torch.float32)
    ranks = empty(num_own, dtype=torch.int32)
    tiles = tile_maxima, tile_sums, tile_counts
    source = logits, logits.stride(0), token_ids
    _measure_kernel[(num_rows, num_tiles)](
        *source, *tiles, group_maxima, num_own, num_columns, num_groups, TILE=TILE, GROUP=GROUP, num_warps=4
    )
    if num_top:
        _choose_top_kernel[(num_rows,)](
            group_maxima,
            groups,
            group_counts,
            num_top,
            num_groups,
            GROUPS=triton.next_power_of_2(num_groups),
            num_warps=8,
        )
    _finish_kernel[(num_rows,)](
        *source,
        *tiles,
        groups,
        group_counts,
        entries,
        values,
        ranks,
        num_own,
        num_top,
        num_columns,
        num_groups,
        num_tiles,
        TILES=triton.next_power_of_2(num_tiles),
        CHUNK=_CHUNK,
        GROUP=GROUP,
        num_warps=4,
    )
    return entries, values, ranks
