"""Adds up the splits of products whose sums are shared by several programs, in the order of the columns."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_NUMBERS = 512
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_splits", "num_numbers"])
def _sum_splits_kernel(partial, bias, output, num_splits, num_numbers, num_outputs, NUMBERS: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    has_number = places < num_numbers
    total = tl.full((NUMBERS,), 0.0, tl.float32)
    for _ in range(num_splits):
        total += tl.load(partial + places, mask=has_number, other=0.0)
        partial += num_numbers
    if bias is not None:
        total += tl.load(bias + places % num_outputs, mask=has_number, other=0.0).to(tl.float32)
    tl.store(output + places, total.to(output.dtype.element_ty), mask=has_number)


def sum_splits(partial: Tensor, bias: Tensor | None, output: Tensor) -> None:
    """Write the sums of `partial` over its first dimension, and `bias`, to `output`.

    Args:
        partial: [splits, T, N] float32, contiguous.
        bias: [N].
        output: [T, N], contiguous, at least one number.
    """
    _sum_splits_kernel[(triton.cdiv(output.numel(), _NUMBERS),)](
        partial,
        bias,
        output,
        len(partial),
        output.numel(),
        output.shape[1],
        NUMBERS=_NUMBERS,
        num_warps=_NUM_WARPS,
    )
