"""Triton's interpreter, without what it does again at every call of a function in a kernel."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


def patch_language_once(patch: pytest.MonkeyPatch) -> None:
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
