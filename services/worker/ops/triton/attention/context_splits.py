"""Divides the context of a few queries over several programs, and merges what they compute.

    program         sequence, heads, split
    split 0         tokens 0 .. n-1 of the context      -> partial result, log of the sum of its weights
    split 1         tokens n .. 2n-1                    -> likewise
    merge           adds up partial results, each weighted by its share of the sum

How many splits there are depends only on numbers on the host, so a captured graph can hold the launches. How long they
are depends on the sequence's context, so that all of a short sequence's splits have work too.

Source: arXiv:2501.01005, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.triton.attention.tile import PagedSequences, padded

_NUM_WARPS = 4
# Columns of a result that a program merges at a time; all splits of them are in registers.
_MERGED_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """How far contexts are divided."""

    wanted_programs: int = 512
    """Splits are made until a launch has this many programs, a few for each multiprocessor of a large GPU."""
    min_tokens: int = 256
    """A split has at least this many tokens, so that its work outweighs the merge."""
    max_splits: int = 64
    """A power of two: the merge is compiled for it."""


SPLIT_LIMITS = SplitLimits()
"""The limits of every launch that is not given others."""


@dataclass(frozen=True, slots=True)
class Partials:
    """Results of splits; rows of the sequences' tokens, from their first one on."""

    attended: Tensor
    """[num_tokens, H, num_splits, V] float32; undefined where the log is -inf."""
    log_sums: Tensor
    """[num_tokens, H, num_splits] float32: logs to base 2 of the sums of weights, -inf where no token is seen."""

    @classmethod
    def empty(cls, sequences: PagedSequences, num_heads: int, num_splits: int, value_dim: int) -> Partials:
        """Room for all tokens of `sequences`."""
        rows, device = (sequences.num_tokens, num_heads, num_splits), sequences.context_lens.device
        attended = torch.empty((*rows, value_dim), dtype=torch.float32, device=device)
        return cls(attended, torch.empty(rows, dtype=torch.float32, device=device))


def choose_num_splits(num_programs: int, num_tokens: int, limits: SplitLimits | None = None) -> int:
    """Into how many splits to divide contexts of up to `num_tokens`, if without splits there are `num_programs`.

    Args:
        limits: None means `SPLIT_LIMITS`.
    """
    limits = limits or SPLIT_LIMITS
    wanted = triton.cdiv(limits.wanted_programs, num_programs)
    return max(min(wanted, num_tokens // limits.min_tokens, limits.max_splits), 1)


@triton.jit
def split_range(begin, end, split, num_splits, tile: tl.constexpr):
    """The part of the tokens from `begin` to before `end` that belongs to a split, in whole tiles: (first, end).

    It is empty, with `first` at least `end`, where there are fewer tiles than splits.
    """
    num_tokens = tl.cdiv(tl.cdiv(end - begin, tile), num_splits) * tile
    first = begin + split * num_tokens
    return first, tl.minimum(first + num_tokens, end)


@triton.jit
def partial_rows(output_rows, cu_seqlens_q, split, num_splits, num_heads: tl.constexpr):
    """Where a split's results for `output_rows` of [T, H, V] are in `Partials`."""
    first_row = tl.load(cu_seqlens_q).to(tl.int64) * num_heads
    return (output_rows - first_row) * num_splits + split


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["cu_seqlens_q"])
def _merge_splits_kernel(
    attended,
    log_sums,
    output,
    cu_seqlens_q,
    num_splits,
    num_heads: tl.constexpr,
    value_dim: tl.constexpr,
    num_columns: tl.constexpr,
    most_splits: tl.constexpr,
):
    num_parts: tl.constexpr = (value_dim + num_columns - 1) // num_columns
    seq = tl.program_id(0)
    token = tl.program_id(1)
    head = tl.program_id(2) // num_parts
    start = tl.load(cu_seqlens_q + seq)
    if token >= tl.load(cu_seqlens_q + seq + 1) - start:
        return
    row = (start + token).to(tl.int64) * num_heads + head
    splits = tl.arange(0, most_splits)
    places = partial_rows(row, cu_seqlens_q, splits, num_splits, num_heads)
    logs = tl.load(log_sums + places, mask=splits < num_splits, other=float("-inf"))
    maximum = tl.max(logs, axis=0)
    weights = tl.exp2(logs - tl.where(maximum == float("-inf"), 0.0, maximum))
    columns = tl.program_id(2) % num_parts * num_columns + tl.arange(0, num_columns)
    has_column = columns < value_dim
    is_written = (logs != float("-inf"))[:, None] & has_column[None, :]
    parts = tl.load(attended + places[:, None] * value_dim + columns[None, :], mask=is_written, other=0.0)
    total = tl.sum(weights, axis=0)
    merged = tl.sum(parts * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * value_dim + columns, merged.to(output.dtype.element_ty), mask=has_column)


def merge_splits(
    partials: Partials, output: Tensor, sequences: PagedSequences, limits: SplitLimits | None = None
) -> None:
    """Write the sequences' rows of `output` [T, H * V], contiguous; zeros for a row that has seen nothing.

    Args:
        limits: What `choose_num_splits` was given.
    """
    _, num_heads, num_splits, value_dim = partials.attended.shape
    num_columns = min(padded(value_dim), _MERGED_COLUMNS)
    num_parts = triton.cdiv(value_dim, num_columns)
    _merge_splits_kernel[(sequences.num_seqs, sequences.max_query_len, num_heads * num_parts)](
        partials.attended,
        partials.log_sums,
        output,
        sequences.cu_seqlens_q,
        num_splits,
        num_heads=num_heads,
        value_dim=value_dim,
        num_columns=num_columns,
        most_splits=(limits or SPLIT_LIMITS).max_splits,
        num_warps=_NUM_WARPS,
    )
