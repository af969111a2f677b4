"""Products of Triton's interpreter as a GPU computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_FLOAT8_DTYPES = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz}


def multiply_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply matrices in bfloat16; by itself it multiplies their bits as integers."""
    create_dot = InterpreterBuilder.create_dot

    def widened(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (self.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b))
        return create_dot(self, a, b, *others)

    patch.setattr(InterpreterBuilder, "create_dot", widened)


def compute_float8(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round to FP8 as GPUs do, to the nearest and among two to the even code, and multiply FP8.

    By itself it rounds wrongly, takes NaN in a product for a number, and does not know gfx942's FP8. Products are of
    widened numbers, added up as the interpreter adds up float32 when this is called.
    """
    create_fp_to_fp, create_dot = InterpreterBuilder.create_fp_to_fp, InterpreterBuilder.create_dot
    patch_language = interpreter._patch_lang_core

    def patch_types(language: Any, scope: Any) -> None:
        patch_language(language, scope)
        to_ir = language.dtype.to_ir

        def with_fnuz(self: Any, builder: Any) -> Any:
            return tl.float8e4b8 if self == tl.float8e4b8 else to_ir(self, builder)

        scope.set_attr(language.dtype, "to_ir", with_fnuz)

    def rounded(self: Any, source: Any, target: Any, *others: Any) -> Any:
        dtype = _FLOAT8_DTYPES.get(target.scalar)
        if dtype is None:
            return create_fp_to_fp(self, source, target, *others)
        return TensorHandle(torch.from_numpy(source.data).to(dtype).view(torch.uint8).numpy(), target.scalar)

    def widened(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, _widen(a), _widen(b), *others)

    patch.setattr(interpreter, "_patch_lang_core", patch_types)
    patch.setattr(InterpreterBuilder, "create_fp_to_fp", rounded)
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


def _widen(operand: Any) -> Any:
    """FP8 as float32; anything else as it is."""
    dtype = _FLOAT8_DTYPES.get(operand.dtype.scalar)
    if dtype is None:
        return operand
    codes = torch.from_numpy(np.ascontiguousarray(operand.data))
    return TensorHandle(codes.view(dtype).float().numpy(), tl.float32)
