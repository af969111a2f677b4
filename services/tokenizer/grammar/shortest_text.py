"""Lower bounds on the length of a form's texts, to refuse those that fit no context.

The library compiles `{"type": "array", "minItems": 1000000000}` in no time. A bound may be too low, never too high.
"""

from __future__ import annotations

import json
import re

from services.tokenizer.json.ecma_regex import full_match_regex
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.schema_places import resolved
from shared.request.grammar import GrammarError

# More than fits anywhere. Sums and products are capped here, since hostile numbers would make them grow without bound.
MAX_BYTES = 2**62
_MAX_DIGITS = len(str(MAX_BYTES)) + 1

# How many nested references are followed.
_MAX_DEPTH = 64

# A piece of a regular expression: a quantifier; something that matches the empty string, such as an anchor; the start
# or end of a group; a class; an escape; any other character. What is not closed extends to the end, and quantifiers are
# possessive, so a hostile expression is scanned once and not again from each of its characters.
_PIECE = re.compile(
    r"(?P<quantifier>(?:[*+?]|\{(?P<least>\d+)(?:,\d*)?\})\??)"
    r"|(?P<nothing>\^|\$|\\[bBAzZ]|\(\?[a-zA-Z-]*\))"
    r"|(?P<open>\((?:\?(?:P?<[^>]*+(?:>|\Z)|[a-zA-Z-]*:))?)"
    r"|(?P<close>\))"
    r"|(?P<alternative>\|)"
    r"|\[\^?\]?(?:\[:\^?\w++:\]|\\.?|[^\]\\])*+(?:\]|\Z)"
    r"|\\(?:x\{[^}]*+(?:\}|\Z)|x..|u\{[^}]*+(?:\}|\Z)|u....|[pP]\{[^}]*+(?:\}|\Z)|[pP].|.)"
    r"|.",
    re.DOTALL,
)
# Verbose mode, whose spaces and comments are not understood here.
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")


def shortest_text(kind: str, text: str) -> int:
    """The bound in bytes, for a form that `grammar_source` has accepted."""
    if kind == "json_schema":
        return shortest_json(json.loads(text))
    if kind == "choices":
        return min(len(choice.encode()) for choice in json.loads(text))
    return shortest_match(text) if kind == "regex" else 0


def shortest_match(pattern: str) -> int:
    """The bound in characters, for a regex in the library's syntax."""
    if _VERBOSE.search(pattern):
        return 0
    outer: list[tuple[int, int]] = []
    # The bounds of the alternatives before this one, of this one so far, and of the last piece.
    best, total, last = MAX_BYTES, 0, 0
    for piece in _PIECE.finditer(pattern):
        if piece["quantifier"]:
            least = 1 if piece[0][0] == "+" else _read_count(piece["least"] or "")
            total, last = total + last * least - last, last * least
        elif piece["open"]:
            outer.append((best, total))
            best, total, last = MAX_BYTES, 0, 0
        elif piece["close"]:
            if not outer:
                return 0
            last = min(best, total)
            best, total = outer.pop()
            total += last
        elif piece["alternative"]:
            best, total, last = min(best, total), 0, 0
        else:
            last = 0 if piece["nothing"] else 1
            total += last
        total, last = min(total, MAX_BYTES), min(last, MAX_BYTES)
    return min(best, total) if not outer else 0


def shortest_json(schema: JsonValue) -> int:
    """The bound in bytes, for a JSON schema."""
    return _ShortestJson(schema).of(schema, 0)


def too_long(shortest_bytes: int, max_bytes: int) -> str:
    """The message for a form whose shortest text is too long."""
    return f"its shortest text has at least {shortest_bytes} bytes, but the model's context holds at most {max_bytes}"


class _ShortestJson:
    """Visits each part of a schema once, however often it is referenced."""

    def __init__(self, root: JsonValue) -> None:
        self._root = root
        # Keyed by the `id` of a part, which the root keeps alive; 0 for a part that is being visited.
        self._known: dict[int, int] = {}

    def of(self, node: JsonValue, depth: int) -> int:
        if not isinstance(node, dict) or depth > _MAX_DEPTH:
            return 1
        if id(node) not in self._known:
            self._known[id(node)] = 0
            self._known[id(node)] = min(self._of_node(node, depth), MAX_BYTES)
        return self._known[id(node)]

    def _of_node(self, node: JsonObject, depth: int) -> int:
        """All keywords must hold, so the largest bound counts."""
        bounds = [self._of_types(node, depth)]
        if "const" in node:
            bounds.append(_size(node["const"]))
        if values := _list(node.get("enum")):
            bounds.append(min(map(_size, values)))
        if isinstance(reference := node.get("$ref"), str):
            bounds.append(self.of(resolved(self._root, reference), depth + 1))
        bounds += [self.of(part, depth + 1) for part in _list(node.get("allOf"))]
        for keyword in ("anyOf", "oneOf"):
            if parts := _list(node.get(keyword)):
                bounds.append(min(self.of(part, depth + 1) for part in parts))
        return max(bounds)

    def _of_types(self, node: JsonObject, depth: int) -> int:
        kinds = node.get("type")
        if not (kinds := kinds if isinstance(kinds, list) else [kinds]):
            return 1
        return min(self._of_type(kind, node, depth) for kind in kinds)

    def _of_type(self, kind: JsonValue, node: JsonObject, depth: int) -> int:
        if kind == "string":
            return _shortest_string(node)
        if kind == "array":
            return self._of_array(node, depth)
        if kind == "object":
            return self._of_object(node, depth)
        return len("null") if kind in ("boolean", "null") else 1

    def _of_array(self, node: JsonObject, depth: int) -> int:
        num_items = _count(node, "minItems")
        first = _list(node.get("prefixItems"))[:num_items]
        others = self.of(node.get("items"), depth + 1)
        sizes = sum(self.of(item, depth + 1) for item in first) + (num_items - len(first)) * others
        return len("[]") + sizes + max(num_items - 1, 0)

    def _of_object(self, node: JsonObject, depth: int) -> int:
        properties = node.get("properties")
        named = properties if isinstance(properties, dict) else {}
        required = {name for name in _list(node.get("required")) if isinstance(name, str)}
        sizes = sum(_size(name) + len(":") + self.of(named.get(name), depth + 1) for name in required)
        return len("{}") + sizes + max(len(required) - 1, 0)


def _shortest_string(node: JsonObject) -> int:
    return len('""') + max(_shortest_pattern(node.get("pattern")), _count(node, "minLength"))


def _shortest_pattern(pattern: JsonValue) -> int:
    try:
        return shortest_match(full_match_regex(pattern)) if isinstance(pattern, str) else 0
    except GrammarError:
        # It may be a pattern that is not held.
        return 0


def _read_count(digits: str) -> int:
    """There may be more digits than `int` accepts, or none."""
    return min(int(digits.lstrip("0")[:_MAX_DIGITS] or 0), MAX_BYTES)


def _count(node: JsonObject, name: str) -> int:
    value = node.get(name)
    return min(max(int(value), 0), MAX_BYTES) if isinstance(value, int | float) else 0


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


def _size(value: JsonValue) -> int:
    """The bound in bytes, for a value; a number counts as 1, since its notation varies."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 1
    if isinstance(value, list):
        return len("[]") + sum(map(_size, value)) + max(len(value) - 1, 0)
    if isinstance(value, dict):
        sizes = sum(_size(name) + len(":") + _size(item) for name, item in value.items())
        return len("{}") + sizes + max(len(value) - 1, 0)
    return len(json.dumps(value, ensure_ascii=False).encode())
