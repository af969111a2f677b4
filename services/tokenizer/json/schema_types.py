"""Which types of values a JSON schema allows.

Source: JSON Schema 2020-12, Validation 6.1.1, and Core 10.2 for what combines schemas.
"""

from __future__ import annotations

from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.schema_places import resolved

# How many references and combinations are followed.
_MAX_DEPTH = 32


def type_of(value: JsonValue) -> str:
    """The type of a value, in JSON Schema's words; a whole number is an integer."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def types_of(schema: JsonValue, root: JsonObject) -> frozenset[str] | None:
    """The types that a schema, which is part of `root`, allows; None if it does not restrict them."""
    return _Types(root).of(schema, 0)


class _Types:
    """Visits each part of a schema once, however often it is referenced."""

    def __init__(self, root: JsonObject) -> None:
        self._root = root
        # Keyed by the `id` of a part, which the root keeps alive; None for a part that is being visited.
        self._known: dict[int, frozenset[str] | None] = {}

    def of(self, node: JsonValue, depth: int) -> frozenset[str] | None:
        if not isinstance(node, dict) or depth > _MAX_DEPTH:
            return None
        if id(node) not in self._known:
            self._known[id(node)] = None
            self._known[id(node)] = self._of_node(node, depth)
        return self._known[id(node)]

    def _of_node(self, node: JsonObject, depth: int) -> frozenset[str] | None:
        """All keywords must hold, so types that one of them excludes are out."""
        bounds: list[frozenset[str] | None] = []
        kinds = node.get("type")
        if kinds := [kinds] if isinstance(kinds, str) else _list(kinds):
            bounds.append(frozenset(kind for kind in kinds if isinstance(kind, str)))
        if choices := [node["const"]] if "const" in node else _list(node.get("enum")):
            bounds.append(frozenset(map(type_of, choices)))
        if isinstance(reference := node.get("$ref"), str):
            bounds.append(self.of(resolved(self._root, reference), depth + 1))
        bounds += [self.of(part, depth + 1) for part in _list(node.get("allOf"))]
        for keyword in ("anyOf", "oneOf"):
            if parts := _list(node.get(keyword)):
                bounds.append(_union([self.of(part, depth + 1) for part in parts]))
        known = [types for types in bounds if types is not None]
        return frozenset.intersection(*known) if known else None


def _union(options: list[frozenset[str] | None]) -> frozenset[str] | None:
    known = [types for types in options if types is not None]
    return frozenset().union(*known) if len(known) == len(options) else None


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
