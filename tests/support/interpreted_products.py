"""Products of Triton's interpreter as a GPU computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def multiply_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply matrices in bfloat16; by itself it multiplies their bits as integers."""
    create_dot = InterpreterBuilder.create_dot

    def widened(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (self.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b))
        return create_dot(self, a, b, *others)

    patch.setattr(InterpreterBuilder, "create_dot", widened)


def multiply_in_order(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter add up every element of a product in one order, as a matrix instruction does.

    By itself it calls a library, where the place of a row in a matrix decides how it is added up.
    """

    def in_order(_self: Any, a: Any, b: Any, summed: Any, *_: Any) -> TensorHandle:
        left, right, total = a.data.astype(np.float32), b.data.astype(np.float32), summed.data.astype(np.float32)
        for place in range(left.shape[1]):
            total = total + left[:, place, None] * right[None, place]
        return TensorHandle(total, summed.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", in_order)
