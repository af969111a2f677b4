"""What prefill and decode share: one step of attention with an online softmax, over a tile of the paged context.

A program has some rows: the G query heads that read the same key/value head, of a few consecutive tokens.

    row         0   1   2   3   4   5   6   7
    token       0   0   0   1   1   1   -   -       8 rows, G = 3
    head        0   1   2   0   1   2   -   -

So each key is loaded once for all heads of its group, and a decode's few queries fill a matrix product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.arguments import AttentionParams
from services.worker.ops.triton.e4m3 import from_e4m3

# Logits are in units of log 2, so that `exp2` gives the weights.
LOG2_E = tl.constexpr(math.log2(math.e))
LOADS_AHEAD_STAGES = 5
"""Pipeline stages with which an NVIDIA GPU reads the next tile's keys and values during the products of this one.

Triton divides all stages but two between loads of which one needs the other: entries of the block table, and the keys
and values that they name. With 2 to 4 stages a tile is read after the products of the one before, so that a program
either reads or computes.
"""


@dataclass(frozen=True, slots=True)
class PagedSequences:
    """Consecutive sequences of a step. The numbers on the host are upper bounds; the tensors decide."""

    block_tables: Tensor
    """[num_seqs, max_blocks] int32, contiguous in the last dimension."""
    context_lens: Tensor
    """[num_seqs] int32."""
    cu_seqlens_q: Tensor
    """[num_seqs + 1] int32: sequence i's rows of the query are [cu[i], cu[i + 1])."""
    num_tokens: int
    """All their rows of the query."""
    max_query_len: int
    max_context_len: int

    @property
    def num_seqs(self) -> int:
        """The number of sequences."""
        return self.context_lens.shape[0]


class Shape(NamedTuple):
    """The constants that an attention kernel is compiled for."""

    block_size: int
    num_kv_heads: int
    group: int
    """Query heads per key/value head."""
    head_dim: int
    value_dim: int
    key_columns: int
    """`head_dim`, padded for a matrix product."""
    value_columns: int
    rows: int
    """Rows of a program, at least `group`; a power of two and at least 16."""
    tile_tokens: int
    """New tokens of a program: as many as have all their heads in its rows."""
    tokens: int
    """Tokens of the context that are read at a time; a power of two and at least 16."""
    has_window: bool
    has_sinks: bool


def make_shape(query: Tensor, cache: tuple[Tensor, ...], params: AttentionParams, *, rows: int, tokens: int) -> Shape:
    """The constants for `query` [T, H, D] and a layer's cache."""
    _, block_size, num_kv_heads, head_dim = cache[0].shape
    value_dim = cache[1].shape[3]
    group = query.shape[1] // num_kv_heads
    return Shape(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        key_columns=padded(head_dim),
        value_columns=padded(value_dim),
        rows=rows,
        tile_tokens=rows // group,
        tokens=tokens,
        has_window=params.window is not None,
        has_sinks=params.sinks is not None,
    )


def padded(size: int) -> int:
    """`size` as a dimension of a matrix product: a power of two, at least 16."""
    return max(triton.next_power_of_2(size), 16)


@triton.jit
def places_of_rows(first_token, start, query_len, kv_head, shape: tl.constexpr):
    """For each row of a program: the token in its sequence, the head, whether there is one, the row of the query."""
    rows = tl.arange(0, shape.rows)
    tokens = first_token + rows // shape.group
    heads = kv_head * shape.group + rows % shape.group
    has_row = (rows < shape.tile_tokens * shape.group) & (tokens < query_len)
    return tokens, heads, has_row, (start + tokens).to(tl.int64)


@triton.jit
def store_attended(output, output_rows, has_row, summed, total, shape: tl.constexpr):
    """Store sums of values, divided by the sums of their weights; zeros for a row that has seen nothing."""
    attended = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    columns = tl.arange(0, shape.value_columns)
    places = output_rows[:, None] * shape.value_dim + columns[None, :]
    mask = has_row[:, None] & (columns < shape.value_dim)[None, :]
    tl.store(output + places, attended.to(output.dtype.element_ty), mask=mask)


@triton.jit
def load_query(
    query, token_rows, heads, has_row, token_stride, head_stride, width: tl.constexpr, num_columns: tl.constexpr
):
    """The query [rows, num_columns] of each row's token and head; 0 from column `width` on."""
    columns = tl.arange(0, num_columns)
    places = token_rows[:, None] * token_stride + heads[:, None] * head_stride + columns[None, :]
    return tl.load(query + places, mask=has_row[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def begin_softmax(sinks, heads, has_row, shape: tl.constexpr):
    """The maximum and the sum [rows] before the first tile: of nothing, or of the sink of each row's head."""
    if shape.has_sinks:
        maximum = tl.load(sinks + heads, mask=has_row, other=0.0) * LOG2_E
        total = tl.full((shape.rows,), 1.0, tl.float32)
    else:
        maximum = tl.full((shape.rows,), float("-inf"), tl.float32)
        total = tl.full((shape.rows,), 0.0, tl.float32)
    return maximum, total


@triton.jit
def add_scores(scores, maximum, total, is_masked: tl.constexpr):
    """Continue the softmax of each row with `scores` [rows, tokens], in units of log 2.

    Args:
        maximum: [rows] float32.
        total: [rows] float32.
        is_masked: Whether a row may have seen no score above -inf yet.

    Returns:
        (the weights of `scores`, the factor of what has been summed before [rows], the new `maximum` and `total`).

    Source: arXiv:2205.14135, algorithm 1, lines 10 and 11.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    base = new_maximum
    if is_masked:
        # A row that has seen nothing yet has weights of exp2(-inf - 0).
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(maximum - base)
    return weights, shrink, new_maximum, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def scale_scores(scale, key_scale):
    """The factor of products of queries and keys: `scale`, times that of the keys' codes if they are codes."""
    if key_scale is not None:
        scale *= tl.load(key_scale)
    return scale


@triton.jit
def scale_values(summed, value_scale):
    """Sums of values, of sums of their codes if they are codes."""
    if value_scale is not None:
        summed *= tl.load(value_scale)
    return summed


@triton.jit
def _load_cached(places, mask, dtype: tl.constexpr):
    """Numbers, or those of codes of E4M3 in `dtype`; 0 outside of `mask`."""
    if places.dtype.scalar.element_ty == tl.float8e4nv:
        codes = tl.load(places.to(tl.pointer_type(tl.uint8), bitcast=True), mask=mask, other=0)
        numbers = from_e4m3(codes).to(dtype)
    else:
        numbers = tl.load(places, mask=mask, other=0.0)
    return numbers


@triton.jit
def attend_tile(
    query,
    accumulator,
    maximum,
    total,
    key_cache,
    value_cache,
    block_table,
    first,
    end,
    query_positions,
    window,
    scale,
    shape: tl.constexpr,
    is_masked: tl.constexpr,
):
    """Attend to the positions from `first` on, as many as a tile has.

    In place of positions from `end` on, which no row sees, the one before `end` is read once more. So the loads need no
    mask, and what another sequence may have left there, such as NaN, does not matter.

    Args:
        query: [rows, key_columns].
        accumulator: [rows, value_columns] float32.
        maximum: [rows] float32.
        total: [rows] float32.
        key_cache: Points at the group's head in slot 0: numbers of the dtype of `query`, or codes of E4M3.
        value_cache: Likewise.
        block_table: Points at the sequence's first block.
        end: More than `first`. If the tile reaches past it, more than the query positions of all rows with a token.
        query_positions: [rows], in the sequence.
        scale: The factor of the products; see `scale_scores`.
        is_masked: May be False if every row sees all positions of the tile.

    Returns:
        `accumulator`, `maximum` and `total` with the tile; see `scale_values`.

    Source: arXiv:2205.14135, algorithm 1, lines 9 to 13.
    """
    positions = first + tl.arange(0, shape.tokens)
    key_columns, value_columns = tl.arange(0, shape.key_columns), tl.arange(0, shape.value_columns)
    read = tl.minimum(positions, end - 1)
    blocks = tl.load(block_table + read // shape.block_size)
    slots = blocks.to(tl.int64) * shape.block_size + read % shape.block_size
    key_rows = key_cache + slots * (shape.num_kv_heads * shape.head_dim)
    has_key = (key_columns < shape.head_dim)[:, None]
    keys = _load_cached(key_rows[None, :] + key_columns[:, None], has_key, query.dtype)
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if is_masked:
        is_seen = positions[None, :] <= query_positions[:, None]
        if shape.has_window:
            is_seen = is_seen & (positions[None, :] > query_positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
    weights, shrink, maximum, total = add_scores(scores, maximum, total, is_masked)
    value_rows = value_cache + slots * (shape.num_kv_heads * shape.value_dim)
    has_value = (value_columns < shape.value_dim)[None, :]
    values = _load_cached(value_rows[:, None] + value_columns[None, :], has_value, query.dtype)
    accumulator = tl.dot(weights.to(values.dtype), values, accumulator * shrink[:, None], input_precision="ieee")
    return accumulator, maximum, total
