"""Which types of values a JSON schema allows.

Source: JSON Schema 2020-12, Validation 6.1.1, and Core 10.2 for what combines schemas.
"""

from __future__ import annotations

from urllib.parse import unquote

from services.tokenizer.json.json_values import JsonObject, JsonValue

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


def types_of(schema: JsonValue, root: JsonObject, depth: int = 0) -> frozenset[str] | None:
    """The types that a schema, which is part of `root`, allows; None if it does not restrict them."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    kinds = schema.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    bounds = [frozenset(kind for kind in kinds if isinstance(kind, str))] if isinstance(kinds, list) else []
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        bounds.append(frozenset(map(type_of, choices)))
    if isinstance(reference := schema.get("$ref"), str):
        bounds += _known(types_of(_resolved(reference, root), root, depth + 1))
    for part in _parts(schema, "allOf"):
        bounds += _known(types_of(part, root, depth + 1))
    for keyword in ("anyOf", "oneOf"):
        options = [types_of(part, root, depth + 1) for part in _parts(schema, keyword)]
        if options and None not in options:
            bounds.append(frozenset().union(*(option for option in options if option is not None)))
    return frozenset.intersection(*bounds) if bounds else None


def _known(types: frozenset[str] | None) -> list[frozenset[str]]:
    return [] if types is None else [types]


def _parts(schema: JsonObject, keyword: str) -> list[JsonValue]:
    parts = schema.get(keyword)
    return parts if isinstance(parts, list) else []


def _resolved(reference: str, root: JsonObject) -> JsonValue:
    """Follow a JSON pointer into the root (RFC 6901, section 4); None for any other reference."""
    node: JsonValue = root
    if reference[:1] != "#" or reference[1:2] not in ("", "/"):
        return None
    for step in unquote(reference).split("/")[1:]:
        if not isinstance(node, dict):
            return None
        node = node.get(step.replace("~1", "/").replace("~0", "~"))
    return node
