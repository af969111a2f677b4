"""The candidates of a filtered row: every column that its filters may keep.

Normally a dense list of the columns whose logit reaches the row's cut. A row with more than its capacity keeps the list
of groups instead, whose columns are all candidates. Both are read the same way: `shift` is 0 or log2 of a group's size,
and candidate i is column (list[i >> shift] << shift) + i % 2**shift. Either list is in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.worker.ops.triton.sampling.ordering import ordered_keys
from services.worker.ops.triton.sampling.row_scan import FILTERED

GROUP_SHIFT = 5


@triton.jit
def gather_kernel(
    logits,
    row_stride,
    kinds,
    cut_keys,
    groups,
    group_counts,
    columns_listed,
    candidate_counts,
    shifts,
    num_columns,
    num_groups,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_SHIFT: tl.constexpr,
):
    """Turn a row's groups into a dense list if there is room for it. `CHUNK` groups are read at once."""
    row = tl.program_id(0)
    if tl.load(kinds + row) != FILTERED:
        return
    logits_row = logits + row.to(tl.int64) * row_stride
    cut_key, num_chosen = tl.load(cut_keys + row), tl.load(group_counts + row)
    lanes = tl.arange(0, CHUNK << GROUP_SHIFT)
    start, num_listed = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    while (start < num_chosen) & (num_listed <= CAPACITY):
        place = start + (lanes >> GROUP_SHIFT)
        group = tl.load(groups + row * num_groups + place, mask=place < num_chosen, other=0)
        columns = (group << GROUP_SHIFT) + (lanes & ((1 << GROUP_SHIFT) - 1))
        is_column = (place < num_chosen) & (columns < num_columns)
        keys = ordered_keys(tl.load(logits_row + columns, mask=is_column, other=float("-inf")))
        is_candidate = is_column & (keys >= cut_key)
        at = num_listed + tl.cumsum(is_candidate.to(tl.int32)) - 1
        tl.store(columns_listed + row * CAPACITY + at, columns, mask=is_candidate & (at < CAPACITY))
        num_listed += tl.sum(is_candidate.to(tl.int32))
        start += CHUNK
    fits = num_listed <= CAPACITY
    tl.store(candidate_counts + row, tl.where(fits, num_listed, num_chosen << GROUP_SHIFT))
    tl.store(shifts + row, tl.where(fits, 0, GROUP_SHIFT))


@triton.jit
def load_candidates(candidates, start, CHUNK: tl.constexpr):
    """The columns and logits of the candidates from `start` on, and which of them there are: [CHUNK]."""
    logits_row, groups, columns_listed, num_candidates, shift, num_columns = candidates
    places = start + tl.arange(0, CHUNK)
    is_listed = places < num_candidates
    dense = tl.load(columns_listed + places, mask=is_listed & (shift == 0), other=0)
    group = tl.load(groups + (places >> shift), mask=is_listed & (shift > 0), other=0)
    columns = dense + (group << shift) + (places & ((1 << shift) - 1))
    is_candidate = is_listed & (columns < num_columns)
    return columns, tl.load(logits_row + columns, mask=is_candidate, other=float("-inf")), is_candidate
