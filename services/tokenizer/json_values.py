"""JSON from clients and models, read strictly."""

from __future__ import annotations

import json
from typing import NoReturn

from services.tokenizer.conversation import JsonObject, JsonValue

MAX_DEPTH = 64


def read_json_object(text: str) -> JsonObject:
    """Read a JSON object whose strings are text that UTF-8 can hold.

    Raises:
        ValueError: it is something else, or nested more than 64 deep.
    """
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    if _is_deeper(value, MAX_DEPTH):
        raise ValueError("nested too deeply")
    # Half a surrogate pair can be written in JSON, and nowhere else.
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _is_deeper(value: JsonValue, depth: int) -> bool:
    if isinstance(value, dict):
        return depth == 0 or any(_is_deeper(item, depth - 1) for item in value.values())
    if isinstance(value, list):
        return depth == 0 or any(_is_deeper(item, depth - 1) for item in value)
    return False
