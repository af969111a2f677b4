"""Checks JSON schemas beyond what the grammar library does."""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.tokenizer.json.json_values import JsonObject, JsonValue
from shared.grammar import GrammarError

# The library does not accept much more.
MAX_SCHEMA_DEPTH = 100

# For a schema's "x-guidance". \u is not allowed: with it, the library would accept another property's name, escaped, as
# an additional property.
STRICT_JSON: JsonObject = {"json_allowed_escapes": 'nrbtf\\"', "lenient": False, "coerce_one_of": False}

# The library computes bounds as doubles, which cannot represent every whole number above this.
_LARGEST_BOUND = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Whole numbers that the library does not round.
_EXACT = range(-(2**63), 2**64)

# Characters that JSON writes with \u. Where only such a character may come, the library omits it.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# A class of several characters, where omitting one leaves others; or an escape; or any character. A class that is not
# closed extends to the end, so a hostile pattern is scanned once and not again from each of its characters.
_PIECE_OF_PATTERN = re.compile(
    r"\[(?:(?>\\(?:x..|u....|.)?|[^\\\]])){2,}+(?:\]|\Z)"
    r"|\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[xu]\{([0-9a-fA-F]+)\}|([0acev])|.)"
    r"|.",
    re.DOTALL,
)


def check_schema(schema: JsonValue) -> None:
    """Refuse schemas for which the library might allow texts that do not fit them.

    Raises:
        GrammarError: the schema has options for the library; control characters; numbers that the library would round;
            or `minProperties` above the number of `required` names plus one: the library allows an additional name
            twice, which counts once.
    """
    for value in _values(schema):
        if isinstance(value, dict):
            _check_object(value)
        elif isinstance(value, str) and _CONTROL.search(value):
            raise GrammarError("control characters are not supported")
        elif type(value) is int and value not in _EXACT and int(float(value)) != value:
            raise GrammarError(f"{_shortened(value)} is not supported: whole numbers have at most 64 bits")


def _check_object(node: JsonObject) -> None:
    if "x-guidance" in node:
        raise GrammarError('"x-guidance" is not allowed')
    least, required = node.get("minProperties"), node.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > num_required + 1:
        raise GrammarError('"minProperties" is supported only up to one more than the number of "required" properties')
    for name in _BOUNDS:
        bound = node.get(name)
        if isinstance(bound, int | float) and abs(bound) > _LARGEST_BOUND and _may_be_whole(node.get("type")):
            raise GrammarError(f'"{name}" {_shortened(bound)} is not supported: at most 2**53 for whole numbers')
    by_pattern = node.get("patternProperties")
    patterns = [node.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ())]
    if any(isinstance(pattern, str) and _needs_control_character(pattern) for pattern in patterns):
        raise GrammarError("control characters are not supported")


def _may_be_whole(kind: JsonValue) -> bool:
    return kind == "integer" or (isinstance(kind, list) and "integer" in kind)


def _shortened(number: float) -> str:
    text = str(number)
    return text if len(text) <= 30 else f"{text[:20]}… ({len(text)} characters)"


def _needs_control_character(pattern: str) -> bool:
    for piece in _PIECE_OF_PATTERN.finditer(pattern):
        digits = piece[1] or piece[2] or piece[3]
        if piece[4] or (digits and int(digits, 16) < 0x80 and _CONTROL.match(chr(int(digits, 16)))):
            return True
    return False


def _values(value: JsonValue) -> Iterator[JsonValue]:
    """A value and everything nested in it, names included; data too, as in `enum`, where keywords are unlikely."""
    values = [value]
    while values:
        value = values.pop()
        yield value
        if isinstance(value, dict):
            values.extend(value)
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)
