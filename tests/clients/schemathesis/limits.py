"""Hooks of schemathesis: what it draws is made cheap enough for a real model."""

from __future__ import annotations

from typing import Any

import schemathesis  # type: ignore[import-not-found]  # It is in its own environment.

_MAX_TOKENS = 4


def map_body(_context: Any, body: Any) -> Any:
    """Ask for few tokens, where the body is one that asks for some."""
    if not isinstance(body, dict):
        return body
    changes: dict[str, Any] = {}
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is None or (isinstance(body[name], int) and body[name] > _MAX_TOKENS):
            changes[name] = _MAX_TOKENS
    # A short time would end in 504, as it should.
    return {key: value for key, value in body.items() if key != "timeout_s"} | changes


schemathesis.hook(map_body)
