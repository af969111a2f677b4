"""The sparse indexer: the positions with the best scores for each new token.

A kernel writes a rank for each token and position: an integer with the ordered bits of the score above the position,
see `sampling.ordering`. Ranks are all different, so the largest are exact, however many scores are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.triton.attention.tile import PagedSequences, padded
from services.worker.ops.triton.attention.token_tiles import count_tiles, find_tile
from services.worker.ops.triton.sampling.ordering import LAST_COLUMN, ranked

# Bounds the ranks that are held at a time, 256 MiB.
_MAX_RANKS = 1 << 25
# Tokens of a program, for all of which it loads keys once.
_TILE_TOKENS = 16
_NUM_WARPS = 4
_NUM_STAGES = 2

# Below every rank; the position in its lower half is -1.
_UNSEEN = tl.constexpr(-(2**63) + 2**31)
_LOWER_HALF = 2**32 - 1


class IndexShape(NamedTuple):
    """The constants that the kernel is compiled for."""

    block_size: int
    num_heads: int
    head_dim: int
    head_rows: int
    """`num_heads`, padded for a matrix product."""
    columns: int
    """`head_dim`, likewise."""
    keys: int
    """Positions of a program."""
    tile_tokens: int


@triton.jit(
    do_not_specialize=["num_seqs", "begin", "end", "num_columns", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "cu_seqlens_q"],
)
def _rank_positions_kernel(
    query,
    weights,
    cache,
    ranks,
    block_tables,
    context_lens,
    cu_seqlens_q,
    num_seqs,
    begin,
    end,
    num_columns,
    table_stride,
    token_stride,
    head_stride,
    weight_stride,
    shape: tl.constexpr,
):
    seq, start, query_len, first_token = find_tile(cu_seqlens_q, num_seqs, tl.program_id(1), begin, shape.tile_tokens)
    end_token = tl.minimum(tl.minimum(first_token + shape.tile_tokens, query_len), end - start)
    if first_token >= end_token:
        return
    context_len = tl.load(context_lens + seq)
    first = tl.program_id(0) * shape.keys
    positions = first + tl.arange(0, shape.keys)
    has_column = positions < num_columns
    # Tokens up to this one see none of the positions.
    first_seeing = tl.minimum(tl.maximum(first + query_len - context_len, first_token), end_token)
    for token in range(first_token, first_seeing):
        places = (start + token - begin).to(tl.int64) * num_columns + positions
        tl.store(ranks + places, tl.full((shape.keys,), _UNSEEN, tl.int64), mask=has_column)
    if first_seeing >= end_token:
        return

    # No token sees positions after the context. Its last one is read again, not what another sequence left.
    read = tl.minimum(positions, context_len - 1)
    blocks = tl.load(block_tables + table_stride.to(tl.int64) * seq + read // shape.block_size)
    slots = blocks.to(tl.int64) * shape.block_size + read % shape.block_size
    columns, heads = tl.arange(0, shape.columns), tl.arange(0, shape.head_rows)
    has_key, has_head = (columns < shape.head_dim)[:, None], heads < shape.num_heads
    keys = tl.load(cache + slots[None, :] * shape.head_dim + columns[:, None], mask=has_key, other=0.0)
    for token in range(first_seeing, end_token):
        row = (start + token).to(tl.int64)
        places = row * token_stride + heads[:, None] * head_stride + columns[None, :]
        queries = tl.load(query + places, mask=has_head[:, None] & (columns < shape.head_dim)[None, :], other=0.0)
        head_weights = tl.load(weights + row * weight_stride + heads, mask=has_head, other=0.0)
        products = tl.dot(queries, keys, input_precision="ieee")
        # Unlike `maximum`, this keeps NaN.
        products = tl.where(products < 0.0, 0.0, products)
        scores = tl.sum(products * head_weights[:, None], axis=0)
        is_seen = positions <= context_len - query_len + token
        tl.store(
            ranks + (row - begin) * num_columns + positions,
            tl.where(is_seen, ranked(scores, positions), _UNSEEN),
            mask=has_column,
        )


def select_context(
    query: Tensor, weights: Tensor, cache: Tensor, parts: Iterable[PagedSequences], *, num_selected: int
) -> Tensor:
    """The best positions for each new token, see `Ops.select_context`.

    Args:
        query: [T, Hi, Di], contiguous in the last dimension. Not written.
        weights: [T, Hi] float32, contiguous in the last dimension.
        cache: [num_blocks, block_size, Di], contiguous, the dtype of `query`, with the new tokens' keys.
        parts: All sequences of the step, in order; `num_tokens` is exact.

    Returns:
        [T, num_selected] int64, -1 for unused entries; undefined for tokens of no sequence.
    """
    selected = torch.empty((len(query), num_selected), dtype=torch.int64, device=query.device)
    begin = 0
    for sequences in parts:
        part_end = begin + sequences.num_tokens
        # Columns after all contexts are unseen, so there are always enough to select from.
        num_columns = max(sequences.max_context_len, num_selected)
        size = max(_MAX_RANKS // num_columns, 1)
        while begin < part_end:
            end = min(begin + size, part_end)
            ranks = torch.empty((end - begin, num_columns), dtype=torch.int64, device=query.device)
            _rank_positions(query, weights, cache, ranks, sequences, begin)
            best = ranks.topk(num_selected, sorted=False).values
            torch.sub(LAST_COLUMN.value, best.bitwise_and_(_LOWER_HALF), out=selected[begin:end])
            begin = end
    return selected


def _rank_positions(
    query: Tensor, weights: Tensor, cache: Tensor, ranks: Tensor, sequences: PagedSequences, begin: int
) -> None:
    """Write `ranks` [num_tokens, num_columns] of the step's tokens from `begin` on."""
    num_tokens, num_columns = ranks.shape
    shape = _make_shape(query, cache)
    num_tiles = count_tiles(num_tokens, sequences.num_seqs, shape.tile_tokens)
    _rank_positions_kernel[(triton.cdiv(num_columns, shape.keys), num_tiles)](
        query,
        weights,
        cache,
        ranks,
        sequences.block_tables,
        sequences.context_lens,
        sequences.cu_seqlens_q,
        sequences.num_seqs,
        begin,
        begin + num_tokens,
        num_columns,
        sequences.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        weights.stride(0),
        shape=shape,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )


def _make_shape(query: Tensor, cache: Tensor) -> IndexShape:
    _, num_heads, head_dim = query.shape
    return IndexShape(
        block_size=cache.shape[1],
        num_heads=num_heads,
        head_dim=head_dim,
        head_rows=padded(num_heads),
        columns=padded(head_dim),
        keys=128 if query.element_size() == 2 else 32,
        tile_tokens=_TILE_TOKENS,
    )
