"""Orders logits by integer keys: larger logits first, equal ones by lower column, NaN before all."""

from __future__ import annotations

import triton
import triton.language as tl

LAST_COLUMN = tl.constexpr(0x7FFFFFFF)
"""A number above every column's."""
LOWEST_KEY = tl.constexpr(-(2**31))
"""Below every key."""
NO_RANK = tl.constexpr(-(2**63))
"""Not above any rank."""


@triton.jit
def ordered_keys(values):
    """An int32 for each float32, in the same order; zeros of either sign are equal, NaN is largest."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    keys = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, keys)


@triton.jit
def ranked(values, columns):
    """An int64 for each entry, all different: the largest is that of the first entry in the order."""
    return (ordered_keys(values).to(tl.int64) << 32) + (0x7FFFFFFF - columns)


@triton.jit
def value_of(rank):
    """The value of an entry, from its `ranked`; zero has no sign."""
    key = (rank >> 32).to(tl.int32)
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def column_of(rank):
    """The column of an entry, int32, from its `ranked`."""
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF).to(tl.int32)
