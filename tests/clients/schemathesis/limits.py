"""Hooks of schemathesis: what it draws is made cheap enough for a real model."""

from __future__ import annotations

from typing import Any

import schemathesis  # type: ignore[import-not-found]  # It is in its own environment.

_MAX_TOKENS = 4


def before_call(_context: Any, case: Any, **_options: Any) -> None:
    """Ask for few tokens in every request, where it asks for some at all: without a number, a chat fills the room."""
    if not isinstance(case.body, dict):
        return
    changes: dict[str, Any] = {}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        given = case.body.get(name)
        if given is None or (type(given) is int and given > _MAX_TOKENS):
            changes[name] = _MAX_TOKENS
    # A short time would end in 504, as it should.
    case.body = {key: value for key, value in case.body.items() if key != "timeout_s"} | changes


schemathesis.hook(before_call)
