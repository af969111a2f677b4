"""Attention of a few new tokens per sequence over a long context, which is split over several programs.

    program         sequence, key/value head, split
    split 0         tokens 0 .. n-1 of the context      -> partial result, log of the sum of its weights
    split 1         tokens n .. 2n-1                    -> likewise
    merge           adds up partial results, each weighted by its share of the sum

How many splits there are depends only on numbers on the host, so a captured graph can hold the launches. How long they
are depends on the sequence's context, so that all of a short sequence's splits have work too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.arguments import AttentionParams
from services.worker.ops.triton.attention_tile import (
    LOG2_E,
    PagedSequences,
    Shape,
    attend_tile,
    begin_softmax,
    load_query,
    make_shape,
    padded,
    places_of_rows,
    store_attended,
)

# Queries are packed into no more rows than this; several programs share those of a longer run.
_MAX_ROWS = 64
_NUM_WARPS = 4
_NUM_STAGES = 2
# Splits are made until a launch has this many programs, a few for each multiprocessor of a large GPU.
_WANTED_PROGRAMS = 512
# A split has at least this many tokens, so that its work outweighs the merge.
_MIN_SPLIT_TOKENS = 256
_MAX_SPLITS = 64


@triton.jit
def _split_tokens(context_len, query_len, num_splits, window, shape: tl.constexpr):
    """The first position that any query sees, and the number of tokens of a split."""
    begin = 0
    if shape.has_window:
        begin = tl.maximum(context_len - query_len - window + 1, 0)
    num_tiles = tl.cdiv(context_len - begin, shape.tokens)
    return begin, tl.cdiv(num_tiles, num_splits) * shape.tokens


@triton.jit(
    do_not_specialize=["num_splits", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "cu_seqlens_q"],
)
def _decode_attention_kernel(
    query,
    key_cache,
    value_cache,
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
    tile_tokens: tl.constexpr = shape.rows // shape.group
    split = tl.program_id(0)
    kv_head = tl.program_id(1) % shape.num_kv_heads
    first_token = tl.program_id(1) // shape.num_kv_heads * tile_tokens
    seq = tl.program_id(2)
    start = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - start
    context_len = tl.load(context_lens + seq)
    begin, num_tokens = _split_tokens(context_len, query_len, num_splits, window, shape)
    begin += split * num_tokens
    if first_token >= query_len:
        return
    if is_split and begin >= context_len:
        return
    tokens, heads, has_row, token_rows = places_of_rows(first_token, start, query_len, kv_head, shape)
    queries = load_query(query, token_rows, heads, has_row, token_stride, head_stride, shape)
    positions = context_len - query_len + tokens
    keys, values = key_cache + kv_head * shape.head_dim, value_cache + kv_head * shape.value_dim
    table = block_tables + table_stride.to(tl.int64) * seq

    maximum, total = begin_softmax(sinks, heads, has_row, shape)
    if shape.has_sinks:
        # The sink is one logit of the whole context, so it joins one of the sums.
        total = tl.where(split == 0, total, 0.0)
    summed = tl.full((shape.rows, shape.value_columns), 0.0, tl.float32)
    end = tl.minimum(begin + num_tokens, context_len)
    for first in range(begin, end, shape.tokens):
        summed, maximum, total = attend_tile(
            queries, summed, maximum, total, keys, values, table, first, end, positions, window, scale, shape, True
        )

    output_rows = token_rows * (shape.num_kv_heads * shape.group) + heads
    if is_split:
        output_rows = output_rows * num_splits + split
        # A row may see nothing of a split: its log sum is -inf.
        tl.store(log_sums + output_rows, maximum + tl.log2(total), mask=has_row)
    store_attended(output, output_rows, has_row, summed, total, shape)


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["context_lens", "cu_seqlens_q"],
)
def _merge_splits_kernel(
    partials,
    log_sums,
    output,
    context_lens,
    cu_seqlens_q,
    num_splits,
    window,
    shape: tl.constexpr,
    most_splits: tl.constexpr,
):
    seq = tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2)
    start = tl.load(cu_seqlens_q + seq)
    query_len = tl.load(cu_seqlens_q + seq + 1) - start
    if token >= query_len:
        return
    context_len = tl.load(context_lens + seq)
    begin, num_tokens = _split_tokens(context_len, query_len, num_splits, window, shape)
    splits = tl.arange(0, most_splits)
    has_split = (splits < num_splits) & (begin + splits * num_tokens < context_len)
    row = (start + token).to(tl.int64) * (shape.num_kv_heads * shape.group) + head
    logs = tl.load(log_sums + row * num_splits + splits, mask=has_split, other=float("-inf"))
    maximum = tl.max(logs, axis=0)
    weights = tl.exp2(logs - tl.where(maximum == float("-inf"), 0.0, maximum))
    columns = tl.arange(0, shape.value_columns)
    has_column = columns < shape.value_dim
    places = (row * num_splits + splits)[:, None] * shape.value_dim + columns[None, :]
    parts = tl.load(partials + places, mask=has_split[:, None] & has_column[None, :], other=0.0)
    total = tl.sum(weights, axis=0)
    attended = tl.sum(parts * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * shape.value_dim + columns, attended.to(output.dtype.element_ty), mask=has_column)


def decode_attention(
    query: Tensor, cache: tuple[Tensor, ...], output: Tensor, sequences: PagedSequences, params: AttentionParams
) -> None:
    """Causal attention of the new tokens of `sequences`, see `Ops.decode_attention`.

    Args:
        query: [T, H, D], contiguous in the last dimension. Not written.
        cache: Keys [num_blocks, block_size, K, D] and values [num_blocks, block_size, K, V], contiguous, the dtype of
            `query`; they include the new tokens.
        output: [T, H * V], contiguous; the rows of the sequences' tokens are written.
        sequences: Their tokens are the first ones of the step.

    Source: arXiv:2205.14135, algorithm 1; arXiv:2309.06180, section 4.1; arXiv:2501.01005, section 2.2 (merge).
    """
    group = query.shape[1] // cache[0].shape[2]
    rows = max(min(padded(sequences.max_query_len * group), _MAX_ROWS), padded(group))
    shape = make_shape(query, cache, params, rows=rows, tokens=_tile_tokens(query))
    num_tiles = shape.num_kv_heads * triton.cdiv(sequences.max_query_len, rows // group)
    num_splits = choose_num_splits(num_tiles * sequences.num_seqs, _seen_tokens(sequences, params))
    is_split = num_splits > 1
    partials, log_sums = _workspace(query, shape, sequences, num_splits) if is_split else (output, None)
    _decode_attention_kernel[(num_splits, num_tiles, sequences.num_seqs)](
        query,
        *cache,
        partials,
        log_sums,
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
        is_split=is_split,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
    )
    if is_split:
        _merge_splits_kernel[(sequences.num_seqs, sequences.max_query_len, query.shape[1])](
            partials,
            log_sums,
            output,
            sequences.context_lens,
            sequences.cu_seqlens_q,
            num_splits,
            params.window or 0,
            shape=shape,
            most_splits=_MAX_SPLITS,
            num_warps=_NUM_WARPS,
        )


def choose_num_splits(num_programs: int, num_tokens: int) -> int:
    """Into how many splits to divide contexts of up to `num_tokens`, if without splits there are `num_programs`."""
    return max(min(triton.cdiv(_WANTED_PROGRAMS, num_programs), num_tokens // _MIN_SPLIT_TOKENS, _MAX_SPLITS), 1)


def _tile_tokens(query: Tensor) -> int:
    """Tokens that a program reads at a time: 16 KiB of keys, or half of that in float32, but at least 16 tokens."""
    key_bytes = padded(query.shape[2]) * query.element_size()
    wanted_bytes = 2**14 if query.element_size() == 2 else 2**13
    return min(max(wanted_bytes // key_bytes, 16), 64)


def _seen_tokens(sequences: PagedSequences, params: AttentionParams) -> int:
    """An upper bound of the tokens that a sequence's queries see."""
    if params.window is None:
        return sequences.max_context_len
    return min(sequences.max_context_len, params.window + sequences.max_query_len - 1)


def _workspace(query: Tensor, shape: Shape, sequences: PagedSequences, num_splits: int) -> tuple[Tensor, Tensor]:
    """Partial results [num_tokens, H, num_splits, V] and the logs of their sums [num_tokens, H, num_splits]."""
    rows = (sequences.num_tokens, query.shape[1], num_splits)
    partials = torch.empty((*rows, shape.value_dim), dtype=torch.float32, device=query.device)
    return partials, torch.empty(rows, dtype=torch.float32, device=query.device)
