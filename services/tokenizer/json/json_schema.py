"""What we ask of the grammar library about JSON schemas, so that every text that ends fits its schema.

The library refuses keywords that it does not know, and references to other documents. Here is what it lets through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.tokenizer.json.json_values import JsonObject, JsonValue
from shared.grammar import GrammarError

# The library reads little more.
MAX_SCHEMA_DEPTH = 100

# For a schema's "x-guidance". Without \u: the library would allow a free name that is another property's, spelled so.
STRICT_JSON: JsonObject = {"json_allowed_escapes": 'nrbtf\\"', "lenient": False, "coerce_one_of": False}

# The library computes bounds with doubles, to which not all whole numbers above it are known.
_LARGEST_BOUND = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Whole numbers that it keeps as they are.
_EXACT = range(-(2**63), 2**64)

# What JSON writes with \u. Where nothing else may stand, the library leaves it out.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# A class of several characters, of which the others remain; or an escape; or any character. A class that is not closed
# goes on to the end: a hostile pattern is read once, and not again from each of its characters.
_PIECE_OF_PATTERN = re.compile(
    r"\[(?:(?>\\(?:x..|u....|.)?|[^\\\]])){2,}+(?:\]|\Z)"
    r"|\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[xu]\{([0-9a-fA-F]+)\}|([0acev])|.)"
    r"|.",
    re.DOTALL,
)


def check_schema(schema: JsonValue) -> None:
    """Refuse what the library would take although a text may come of it that does not fit the schema.

    Raises:
        GrammarError: options for the library; control characters; numbers that it would round; or `minProperties` of
            which more than one would be of names that are not in `required`: the library lets a free name occur twice,
            which counts once.
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
        raise GrammarError('"x-guidance" is not taken')
    least, required = node.get("minProperties"), node.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > num_required + 1:
        raise GrammarError('"minProperties" is supported up to one more than there are "required" properties')
    for name in _BOUNDS:
        bound = node.get(name)
        if isinstance(bound, int | float) and abs(bound) > _LARGEST_BOUND and _may_be_whole(node.get("type")):
            raise GrammarError(f'"{name}" {_shortened(bound)} is not supported: at most 2**53 for whole numbers')
    by_pattern = node.get("patternProperties")
    patterns = [node.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ())]
    if any(isinstance(pattern, str) and _needs_control_character(pattern) for pattern in patterns):
        raise GrammarError("control characters are not supported")


def _may_be_whole(kind: JsonValue) -> bool:
    """Whether a schema's "type" asks for whole numbers."""
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
    """A value and all that is in it, names included. Some of it is data, as in `enum`: keywords are rare there."""
    values = [value]
    while values:
        value = values.pop()
        yield value
        if isinstance(value, dict):
            values.extend(value)
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)
