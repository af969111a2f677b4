"""Shared by the tests of the Triton kernels."""

from __future__ import annotations

from typing import Any

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply matrices in bfloat16; by itself it multiplies their bits as integers."""
    create_dot = InterpreterBuilder.create_dot

    def widened(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (self.cast_impl(each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b))
        return create_dot(self, a, b, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", widened)
