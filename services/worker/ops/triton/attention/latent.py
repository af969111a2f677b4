"""Latent attention: all query heads share one row of the cache per token, which is the key and begins with the value.

    row of the cache        | value_dim columns | rotated columns |
    product with a query    |<------------- both ---------------->|
    weighted sum            |<----------------->|

A program has a tile of a sequence's new tokens, see `token_tiles`, and some of their heads; it reads each value once,
for the product and for the sum. If there are few programs, each has a split of the context, see `context_splits`.

Sparse attention reads the positions that a token selected in place of its whole context; a program has one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.triton.attention.context_splits import (
    Partials,
    choose_num_splits,
    merge_splits,
    partial_rows,
    split_range,
)
from services.worker.ops.triton.attention.tile import (
    LOADS_AHEAD_STAGES,
    LOG2_E,
    PagedSequences,
    add_scores,
    load_query,
    padded,
    places_of_rows,
    store_attended,
)
from services.worker.ops.triton.attention.token_tiles import count_tiles, find_tile


class LatentShape(NamedTuple):
    """The constants that the kernel is compiled for; names as in `tile.Shape`."""

    block_size: int
    num_heads: int
    group: int
    """Heads of a program; divides `num_heads`."""
    latent_dim: int
    """Width of a row of the cache."""
    value_dim: int
    value_columns: int
    rotated_dim: int
    """Columns of a key after its value."""
    rotated_columns: int
    rows: int
    tile_tokens: int
    tokens: int
    is_sparse: bool


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The size of a program's work, and how it is compiled."""

    rows: int
    """Heads of new tokens; a power of two and at least 16."""
    tokens: int
    """Tokens of the context that are read at a time; a power of two and at least 16."""
    num_warps: int
    num_stages: int
    """Stages of Triton's software pipeline."""


def choose_latent_config(itemsize: int, num_rows: int, *, is_sparse: bool) -> LatentConfig:
    """Choose for elements of `itemsize` bytes and `num_rows` rows, as far as a program can have them.

    A program's sums of values have hundreds of columns, which need most of its registers.
    """
    is_amd = torch.version.hip is not None
    if itemsize > 2:
        return LatentConfig(16, tokens=16, num_warps=4 if is_amd else 8, num_stages=1)
    # In sparse attention a third load comes before the others, for which there are not registers enough.
    num_stages = 2 if is_amd or is_sparse else LOADS_AHEAD_STAGES
    if num_rows <= 16:
        return LatentConfig(16, tokens=32, num_warps=4, num_stages=num_stages)
    if is_amd:
        return LatentConfig(min(num_rows, 64), tokens=16, num_warps=4, num_stages=1)
    return LatentConfig(32, tokens=32, num_warps=8, num_stages=num_stages)


@triton.jit
def _attend_latents(
    query,
    rotated_query,
    accumulator,
    maximum,
    total,
    cache,
    block_table,
    read,
    is_used,
    is_seen,
    scale,
    shape: tl.constexpr,
):
    """Attend to the positions `read` [tokens], all of which have a block.

    Args:
        query: [rows, value_columns].
        rotated_query: [rows, rotated_columns].
        accumulator: [rows, value_columns] float32.
        is_used: [tokens], in sparse attention: whether there is an entry; what is not used is not read.
        is_seen: [rows or 1, tokens].

    Returns:
        `accumulator`, `maximum` and `total` with these positions.
    """
    columns, rotated_columns = tl.arange(0, shape.value_columns), tl.arange(0, shape.rotated_columns)
    blocks = tl.load(block_table + read // shape.block_size)
    slots = blocks.to(tl.int64) * shape.block_size + read % shape.block_size
    rows = cache + slots * shape.latent_dim
    has_value = (columns < shape.value_dim)[None, :]
    has_rotated = (rotated_columns < shape.rotated_dim)[:, None]
    if shape.is_sparse:
        has_value = has_value & is_used[:, None]
        has_rotated = has_rotated & is_used[None, :]
    values = tl.load(rows[:, None] + columns[None, :], mask=has_value, other=0.0)
    rotated = tl.load(rows[None, :] + (shape.value_dim + rotated_columns)[:, None], mask=has_rotated, other=0.0)
    scores = tl.dot(rotated_query, rotated, input_precision="ieee")
    scores = tl.dot(query, tl.trans(values), scores, input_precision="ieee") * scale
    scores = tl.where(is_seen, scores, float("-inf"))
    weights, shrink, maximum, total = add_scores(scores, maximum, total, True)
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator * shrink[:, None], input_precision="ieee")
    return accumulator, maximum, total


@triton.jit(
    do_not_specialize=["num_selected", "num_seqs", "num_splits", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "context_lens", "cu_seqlens_q"],
)
def _latent_attention_kernel(
    query,
    cache,
    output,
    log_sums,
    selected,
    block_tables,
    context_lens,
    cu_seqlens_q,
    num_selected,
    num_seqs,
    num_splits,
    table_stride,
    token_stride,
    head_stride,
    scale,
    shape: tl.constexpr,
    is_split: tl.constexpr,
):
    num_groups: tl.constexpr = shape.num_heads // shape.group
    # The last tiles of a prompt see the most tokens, so they start first. All heads of a tile read the same latents.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    split = tl.program_id(1)
    seq, start, query_len, first_token = find_tile(
        cu_seqlens_q, num_seqs, program // num_groups, tl.load(cu_seqlens_q), shape.tile_tokens
    )
    if first_token >= query_len:
        return
    context_len = tl.load(context_lens + seq)
    tokens, heads, has_row, token_rows = places_of_rows(first_token, start, query_len, program % num_groups, shape)
    query_positions = context_len - query_len + tokens
    # Entries are positions of the context, or places in the token's selection.
    begin = 0
    end = tl.minimum(context_len - query_len + first_token + shape.tile_tokens, context_len)
    if shape.is_sparse:
        selected += (start + first_token).to(tl.int64) * num_selected
        end = num_selected
    output_rows = token_rows * shape.num_heads + heads
    if is_split:
        output_rows = partial_rows(output_rows, cu_seqlens_q, split, num_splits, shape.num_heads)
        begin, end = split_range(begin, end, split, num_splits, shape.tokens)
        if begin >= end:
            tl.store(log_sums + output_rows, float("-inf"), mask=has_row)
            return
    queries = load_query(
        query, token_rows, heads, has_row, token_stride, head_stride, shape.value_dim, shape.value_columns
    )
    rotated_queries = load_query(
        query + shape.value_dim,
        token_rows,
        heads,
        has_row,
        token_stride,
        head_stride,
        shape.rotated_dim,
        shape.rotated_columns,
    )
    table = block_tables + table_stride.to(tl.int64) * seq

    maximum = tl.full((shape.rows,), float("-inf"), tl.float32)
    total = tl.full((shape.rows,), 0.0, tl.float32)
    summed = tl.full((shape.rows, shape.value_columns), 0.0, tl.float32)
    for first in range(begin, end, shape.tokens):
        entries = first + tl.arange(0, shape.tokens)
        if shape.is_sparse:
            positions = tl.load(selected + entries, mask=entries < end, other=-1).to(tl.int32)
            is_used = positions >= 0
            is_seen = is_used[None, :]
            read = tl.maximum(positions, 0)
        else:
            is_used = None
            is_seen = entries[None, :] <= query_positions[:, None]
            # No row sees positions from `end` on. The one before it is read again, not what another sequence left.
            read = tl.minimum(entries, end - 1)
        summed, maximum, total = _attend_latents(
            queries,
            rotated_queries,
            summed,
            maximum,
            total,
            cache,
            table,
            read,
            is_used,
            is_seen,
            scale,
            shape,
        )

    if is_split:
        # A row may see nothing of a split: its log sum is -inf.
        tl.store(log_sums + output_rows, maximum + tl.log2(total), mask=has_row)
    store_attended(output, output_rows, has_row, summed, total, shape)


def latent_attention(
    query: Tensor,
    cache: Tensor,
    output: Tensor,
    sequences: PagedSequences,
    *,
    scale: float,
    selected: Tensor | None,
    is_exact: bool = False,
    config: LatentConfig | None = None,
) -> None:
    """Causal attention of the new tokens of `sequences`, see `Ops.mla_attention`.

    Args:
        query: [T, H, L], contiguous in the last dimension. Not written.
        cache: [num_blocks, block_size, L], contiguous, the dtype of `query`, with the new tokens' latents.
        output: [T, H, R], contiguous; the rows of the sequences' tokens are written.
        selected: [T, num_selected] int64, contiguous.
        is_exact: Whether a token's bits do not depend on the step that it is in: no context is split.
        config: None means that of `choose_latent_config`.

    Source: arXiv:2405.04434, section 2.1 and appendix C; arXiv:2205.14135, algorithm 1; arXiv:2309.06180, section 4.1.
    """
    num_heads, value_dim = output.shape[1:]
    # An exact program's size is that for one token, however many there are.
    num_tokens = sequences.max_query_len if selected is None and not is_exact else 1
    if config is None:
        num_rows = padded(num_tokens * num_heads)
        config = choose_latent_config(query.element_size(), num_rows, is_sparse=selected is not None)
    shape = _make_shape(query, cache, value_dim, config, is_sparse=selected is not None)
    num_tiles = count_tiles(sequences.num_tokens, sequences.num_seqs, shape.tile_tokens)
    num_programs = num_tiles * num_heads // shape.group
    num_read = sequences.max_context_len if selected is None else selected.shape[1]
    num_splits = 1 if is_exact else choose_num_splits(num_programs, num_read)
    partials = None
    if num_splits > 1:
        partials = Partials.empty(sequences, num_heads, num_splits, value_dim)
    _latent_attention_kernel[(num_programs, num_splits)](
        query,
        cache,
        output if partials is None else partials.attended,
        None if partials is None else partials.log_sums,
        selected,
        sequences.block_tables,
        sequences.context_lens,
        sequences.cu_seqlens_q,
        num_read,
        sequences.num_seqs,
        num_splits,
        sequences.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        scale * LOG2_E.value,
        shape=shape,
        is_split=partials is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if partials is not None:
        merge_splits(partials, output, sequences)


def _make_shape(query: Tensor, cache: Tensor, value_dim: int, config: LatentConfig, *, is_sparse: bool) -> LatentShape:
    num_heads = query.shape[1]
    _, block_size, latent_dim = cache.shape
    value_columns = padded(value_dim)
    group = max(count for count in range(1, config.rows + 1) if num_heads % count == 0)
    return LatentShape(
        block_size=block_size,
        num_heads=num_heads,
        group=group,
        latent_dim=latent_dim,
        value_dim=value_dim,
        value_columns=value_columns,
        rotated_dim=latent_dim - value_dim,
        rotated_columns=padded(latent_dim - value_dim),
        rows=config.rows,
        tile_tokens=1 if is_sparse else config.rows // group,
        tokens=config.tokens,
        is_sparse=is_sparse,
    )
