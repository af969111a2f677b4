"""Attention of chunks of prompts over their sequences, read from the paged cache.

A program has a tile of a sequence's new tokens, see `token_tiles`, and the query heads of one key/value head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.forward.kv_cache import split_scales
from services.worker.ops.arguments import AttentionParams
from services.worker.ops.triton.attention.tile import (
    LOADS_AHEAD_STAGES,
    LOG2_E,
    PagedSequences,
    attend_tile,
    begin_softmax,
    load_query,
    make_shape,
    padded,
    places_of_rows,
    scale_scores,
    scale_values,
    store_attended,
)
from services.worker.ops.triton.attention.token_tiles import count_tiles, find_tile


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """The size of a program's work, and how it is compiled."""

    rows: int
    """Query heads of new tokens; a power of two, at least 16 and at least a key/value head's query heads."""
    tokens: int
    """Tokens of the context that are read at a time; a power of two and at least 16."""
    num_warps: int
    num_stages: int
    """Stages of Triton's software pipeline."""


def choose_prefill_config(key_columns: int, itemsize: int, group: int, *, has_codes: bool) -> PrefillConfig:
    """Choose for heads of `key_columns` columns of `itemsize` bytes, and `group` query heads per key/value head.

    Keys and values that are made of codes are in registers before their products.
    """
    if itemsize > 2:
        # NVIDIA has no matrix instructions for float32, so products need many more registers.
        return PrefillConfig(max(32, padded(group)), tokens=32, num_warps=8, num_stages=1)
    if key_columns > 128:
        return PrefillConfig(max(64, padded(group)), tokens=16 if has_codes else 32, num_warps=4, num_stages=2)
    rows = max(128, padded(group))
    if torch.version.hip is not None:
        # Larger tiles of the context do not fit the registers of CDNA 3.
        return PrefillConfig(rows, tokens=32, num_warps=4, num_stages=2)
    if key_columns <= 64:
        # A multiprocessor has several programs, of which one computes while others wait.
        return PrefillConfig(rows, tokens=64, num_warps=4, num_stages=2)
    return PrefillConfig(rows, tokens=64, num_warps=8, num_stages=LOADS_AHEAD_STAGES)


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "cu_seqlens_q"],
)
def _prefill_attention_kernel(
    query,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    output,
    block_tables,
    context_lens,
    cu_seqlens_q,
    sinks,
    num_seqs,
    table_stride,
    token_stride,
    head_stride,
    window,
    scale,
    shape: tl.constexpr,
    is_exact: tl.constexpr,
):
    # The last tiles of a prompt see the most tokens, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    begin = tl.load(cu_seqlens_q)
    seq, start, query_len, first_token = find_tile(cu_seqlens_q, num_seqs, tile, begin, shape.tile_tokens)
    if first_token >= query_len:
        return
    context_len = tl.load(context_lens + seq)
    first_position = context_len - query_len + first_token
    kv_head = tl.program_id(1)
    tokens, heads, has_row, token_rows = places_of_rows(first_token, start, query_len, kv_head, shape)
    queries = load_query(
        query, token_rows, heads, has_row, token_stride, head_stride, shape.head_dim, shape.key_columns
    )
    positions = context_len - query_len + tokens
    keys, values = key_cache + kv_head * shape.head_dim, value_cache + kv_head * shape.value_dim
    table = block_tables + table_stride.to(tl.int64) * seq

    scale = scale_scores(scale, key_scale)
    maximum, total = begin_softmax(sinks, heads, has_row, shape)
    summed = tl.full((shape.rows, shape.value_columns), 0.0, tl.float32)
    end = tl.minimum(first_position + shape.tile_tokens, context_len)
    if shape.has_window:
        begin = tl.maximum(first_position - window + 1, 0)
        if is_exact:
            begin = begin // shape.tokens * shape.tokens
    elif is_exact:
        # One loop, so that a tile of the context is added in the same way to every token that sees all of it.
        begin = 0
    else:
        # Every row sees all of the tiles before the one with the first token.
        begin = tl.maximum(first_position + 1, 0) // shape.tokens * shape.tokens
        for first in range(0, begin, shape.tokens):
            summed, maximum, total = attend_tile(
                queries, summed, maximum, total, keys, values, table, first, end, positions, window, scale, shape, False
            )
    for first in range(begin, end, shape.tokens):
        summed, maximum, total = attend_tile(
            queries, summed, maximum, total, keys, values, table, first, end, positions, window, scale, shape, True
        )

    # Only rows of padding have seen nothing.
    output_rows = token_rows * (shape.num_kv_heads * shape.group) + heads
    store_attended(output, output_rows, has_row, scale_values(summed, value_scale), total, shape)


def prefill_attention(
    query: Tensor,
    cache: tuple[Tensor, ...],
    output: Tensor,
    sequences: PagedSequences,
    params: AttentionParams,
    *,
    is_exact: bool = False,
    config: PrefillConfig | None = None,
) -> None:
    """Causal attention of the new tokens of `sequences`, see `Ops.prefill_attention`.

    Args:
        query: [T, H, D], contiguous in the last dimension. Not written.
        cache: Keys [num_blocks, block_size, K, D] and values [num_blocks, block_size, K, V], contiguous, the dtype of
            `query`, or float8_e4m3fn with their scales [1] float32; they include the new tokens.
        output: [T, H * V], contiguous; the rows of the sequences' tokens are written.
        is_exact: Whether a token's bits do not depend on the chunk that it is in. Tiles of the context then begin at
            multiples of their size. Those of which a token sees nothing change no bit of its sums.
        config: None means that of `choose_prefill_config`.

    Source: arXiv:2205.14135, algorithm 1; arXiv:2309.06180, section 4.1.
    """
    if config is None:
        group, has_codes = query.shape[1] // cache[0].shape[2], cache[0].dtype != query.dtype
        config = choose_prefill_config(padded(query.shape[2]), query.element_size(), group, has_codes=has_codes)
    shape = make_shape(query, cache, params, rows=config.rows, tokens=config.tokens)
    num_tiles = count_tiles(sequences.num_tokens, sequences.num_seqs, shape.tile_tokens)
    _prefill_attention_kernel[(num_tiles, shape.num_kv_heads)](
        query,
        *split_scales(cache),
        output,
        sequences.block_tables,
        sequences.context_lens,
        sequences.cu_seqlens_q,
        params.sinks,
        sequences.num_seqs,
        sequences.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        params.window or 0,
        params.scale * LOG2_E.value,
        shape=shape,
        is_exact=is_exact,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
