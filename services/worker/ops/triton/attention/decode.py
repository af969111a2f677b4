"""Attention of a few new tokens per sequence over a long context, which may be split, see `context_splits`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.forward.kv_cache import split_scales
from services.worker.ops.arguments import AttentionParams
from services.worker.ops.triton.attention.context_splits import (
    Partials,
    SplitLimits,
    choose_num_splits,
    merge_splits,
    partial_rows,
    split_range,
)
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

# Queries are packed into no more rows than this; several programs share those of a longer run.
_MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The size of a program's work, and how it is compiled."""

    tokens: int
    """Tokens of the context that are read at a time; a power of two and at least 16."""
    num_warps: int = 4
    num_stages: int = 2
    """Stages of Triton's software pipeline."""


def choose_decode_config(key_columns: int, itemsize: int, *, has_codes: bool) -> DecodeConfig:
    """Choose for keys of `key_columns` columns of `itemsize` bytes, which may be made of codes in registers."""
    is_amd = torch.version.hip is not None
    # 8 KiB of keys, or on AMD twice that unless they need more registers.
    wanted_bytes = 2**14 if is_amd and not has_codes and itemsize == 2 else 2**13
    tokens = min(max(wanted_bytes // (key_columns * itemsize), 16), 64)
    if itemsize > 2:
        return DecodeConfig(tokens, num_warps=8, num_stages=1) if has_codes else DecodeConfig(tokens)
    return DecodeConfig(tokens) if is_amd else DecodeConfig(tokens, num_stages=LOADS_AHEAD_STAGES)


@triton.jit(
    do_not_specialize=["num_splits", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "cu_seqlens_q"],
)
def _decode_attention_kernel(
    query,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    output,
    log_sums,
    block_tables,
    context_lens,
    cu_seqlens_q,
    sinks,
    num_splits,
    table_stride,
    token_stride,
    head_stride,
    window,
    scale,
    shape: tl.constexpr,
    is_split: tl.constexpr,
):
    split = tl.program_id(0)
    kv_head = tl.program_id(1) % shape.num_kv_heads
    first_token = tl.program_id(1) // shape.num_kv_heads * shape.tile_tokens
    seq = tl.program_id(2)
    start = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - start
    if first_token >= query_len:
        return
    context_len = tl.load(context_lens + seq)
    tokens, heads, has_row, token_rows = places_of_rows(first_token, start, query_len, kv_head, shape)
    begin = 0
    if shape.has_window:
        begin = tl.maximum(context_len - query_len - window + 1, 0)
    end = context_len
    if is_split:
        begin, end = split_range(begin, end, split, num_splits, shape.tokens)
        if begin >= end:
            empty_rows = token_rows * (shape.num_kv_heads * shape.group) + heads
            empty_rows = partial_rows(empty_rows, cu_seqlens_q, split, num_splits, shape.num_kv_heads * shape.group)
            tl.store(log_sums + empty_rows, float("-inf"), mask=has_row)
            return
    queries = load_query(
        query, token_rows, heads, has_row, token_stride, head_stride, shape.head_dim, shape.key_columns
    )
    positions = context_len - query_len + tokens
    keys, values = key_cache + kv_head * shape.head_dim, value_cache + kv_head * shape.value_dim
    table = block_tables + table_stride.to(tl.int64) * seq

    scale = scale_scores(scale, key_scale)
    maximum, total = begin_softmax(sinks, heads, has_row, shape)
    if shape.has_sinks:
        # The sink is one logit of the whole context, so it joins one of the sums.
        total = tl.where(split == 0, total, 0.0)
    summed = tl.full((shape.rows, shape.value_columns), 0.0, tl.float32)
    for first in range(begin, end, shape.tokens):
        summed, maximum, total = attend_tile(
            queries, summed, maximum, total, keys, values, table, first, end, positions, window, scale, shape, True
        )

    # Not before the loop, where it would need registers.
    output_rows = token_rows * (shape.num_kv_heads * shape.group) + heads
    if is_split:
        output_rows = partial_rows(output_rows, cu_seqlens_q, split, num_splits, shape.num_kv_heads * shape.group)
        # A row may see nothing of a split: its log sum is -inf.
        tl.store(log_sums + output_rows, maximum + tl.log2(total), mask=has_row)
    store_attended(output, output_rows, has_row, scale_values(summed, value_scale), total, shape)


def decode_attention(
    query: Tensor,
    cache: tuple[Tensor, ...],
    output: Tensor,
    sequences: PagedSequences,
    params: AttentionParams,
    *,
    config: DecodeConfig | None = None,
    limits: SplitLimits | None = None,
) -> None:
    """Causal attention of the new tokens of `sequences`, see `Ops.decode_attention`.

    Args:
        query: [T, H, D], contiguous in the last dimension. Not written.
        cache: Keys [num_blocks, block_size, K, D] and values [num_blocks, block_size, K, V], contiguous, the dtype of
            `query`, or float8_e4m3fn with their scales [1] float32; they include the new tokens.
        output: [T, H * V], contiguous; the rows of the sequences' tokens are written.
        sequences: Their tokens are the first ones of the step.
        config: None means that of `choose_decode_config`.
        limits: See `choose_num_splits`.

    Source: arXiv:2205.14135, algorithm 1; arXiv:2309.06180, section 4.1.
    """
    group = query.shape[1] // cache[0].shape[2]
    rows = max(min(padded(sequences.max_query_len * group), _MAX_ROWS), padded(group))
    if config is None:
        has_codes = cache[0].dtype != query.dtype
        config = choose_decode_config(padded(query.shape[2]), query.element_size(), has_codes=has_codes)
    shape = make_shape(query, cache, params, rows=rows, tokens=config.tokens)
    num_tiles = shape.num_kv_heads * triton.cdiv(sequences.max_query_len, shape.tile_tokens)
    num_splits = choose_num_splits(num_tiles * sequences.num_seqs, _seen_tokens(sequences, params), limits)
    partials = None
    if num_splits > 1:
        partials = Partials.empty(sequences, query.shape[1], num_splits, shape.value_dim)
    _decode_attention_kernel[(num_splits, num_tiles, sequences.num_seqs)](
        query,
        *split_scales(cache),
        output if partials is None else partials.attended,
        None if partials is None else partials.log_sums,
        sequences.block_tables,
        sequences.context_lens,
        sequences.cu_seqlens_q,
        params.sinks,
        num_splits,
        sequences.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        params.window or 0,
        params.scale * LOG2_E.value,
        shape=shape,
        is_split=partials is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if partials is not None:
        merge_splits(partials, output, sequences, limits)


def _seen_tokens(sequences: PagedSequences, params: AttentionParams) -> int:
    """An upper bound of the tokens that a sequence's queries see."""
    if params.window is None:
        return sequences.max_context_len
    return min(sequences.max_context_len, params.window + sequences.max_query_len - 1)
