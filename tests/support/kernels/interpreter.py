"""Triton's interpreter, without what it does in vain at every call and at every operation in a kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def quicken(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter leave out what it does in vain: most of the time of a kernel with small tiles."""
    _patch_language_once(patch)
    _compute_once(patch)


def _patch_language_once(patch: pytest.MonkeyPatch) -> None:
    """Let a launch replace the functions of `triton.language` once, not also at every call of a function in its kernel.

    By itself the interpreter looks through all of the language at each call, finds everything replaced, and spends
    half of its time on that.
    """
    patch_language, replaced = interpreter._patch_lang, set[str]()

    class LaunchScope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    @cache
    def modules_of(function: Any) -> frozenset[str]:
        values = function.__globals__.values()
        return frozenset(module.__name__ for module in (tl, tl.core) if any(value is module for value in values))

    def patch_rest(function: Any) -> Any:
        scope, modules = LaunchScope(), modules_of(function)
        if not modules <= replaced:
            # A function's scope is never left, a launch's is.
            scope._changes = patch_language(function)._changes
            replaced.update(modules)
        return scope

    patch.setattr(interpreter, "_patch_lang", patch_rest)


def _compute_once(patch: pytest.MonkeyPatch) -> None:
    """Let sums, differences and products of integers be computed once, and NumPy's type of a type be looked up once.

    By itself the interpreter computes them a second time, in 64 bits, to assert that they have not overflowed: and
    drops the assertion, since it is not in its debug mode. It writes its table of types anew at every look-up.
    """
    find_dtype = interpreter._get_np_dtype
    assert not interpreter.interpreter_builder.options.debug
    dtypes: dict[str, np.dtype[Any]] = {}

    def find_once(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(dtype.scalar)
        return dtypes[name]

    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)
    patch.setattr(interpreter, "_get_np_dtype", find_once)
