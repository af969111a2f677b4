"""Which types of values a JSON schema allows, and which schemas a property of an object has.

Source: JSON Schema 2020-12, Validation 6.1.1, and Core 10.2 and 10.3.2 for what combines schemas and applies them to
properties.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.pattern_search import is_found
from services.tokenizer.json.schema_places import resolved

# How many references and combinations are followed.
_MAX_DEPTH = 32
_NUMBERS = frozenset({"integer", "number"})


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
    """The types that a schema, which is part of `root`, allows; None if it does not restrict them.

    "number" comes with "integer".
    """
    return _Types(root).of(schema, 0)


def property_types(root: JsonObject, name: str) -> frozenset[str] | None:
    """The types of a property of the objects that `root` describes; None if nothing is known of them.

    Of several options (`anyOf`, `oneOf`) only those count that have a schema for it, and conditions (`then`, `else`,
    `dependentSchemas`) only where nothing else has one.
    """
    types = _Types(root)
    (found, is_named), (conditional, _) = (_PropertyTypes(types, name, each).of(root, 0) for each in (False, True))
    return found if is_named else conditional


def property_options(node: JsonObject, name: str) -> list[list[JsonValue]]:
    """What the keywords of one schema that name properties say of a property: one schema of each list must hold.

    Empty if they say nothing. A list has several where it is not known whether a pattern is found in the name.
    """
    named, by_pattern = _object(node.get("properties")), _object(node.get("patternProperties"))
    found = {pattern: is_found(pattern, name) for pattern in by_pattern}
    options = [[named[name]]] if name in named else []
    options += [[by_pattern[pattern]] for pattern, is_there in found.items() if is_there]
    if not options:
        others = [by_pattern[pattern] for pattern, is_there in found.items() if is_there is None]
        if others or "additionalProperties" in node:
            options = [[*others, node.get("additionalProperties", True)]]
    return options


def named_properties(root: JsonObject) -> frozenset[str]:
    """The names in `properties` of the objects that `root` describes, of all options and conditions too."""
    names: set[str] = set()
    nodes: list[JsonValue] = [root]
    visited: set[int] = set()
    while nodes:
        node = nodes.pop()
        if not isinstance(node, dict) or id(node) in visited:
            continue
        visited.add(id(node))
        names |= _object(node.get("properties")).keys()
        if isinstance(reference := node.get("$ref"), str):
            nodes.append(resolved(root, reference))
        for keyword in ("allOf", "anyOf", "oneOf"):
            nodes += _list(node.get(keyword))
        nodes += [node.get("then"), node.get("else"), *_object(node.get("dependentSchemas")).values()]
    return frozenset(names)


class _Types:
    """Visits each part of a schema once, however often it is referenced."""

    def __init__(self, root: JsonObject) -> None:
        self.root = root
        # Keyed by the `id` of a part, which the root keeps alive; None for a part that is being visited.
        self._known: dict[int, frozenset[str] | None] = {}

    def of(self, node: JsonValue, depth: int) -> frozenset[str] | None:
        if node is False:
            return frozenset()
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
            bounds.append(_with_integers(frozenset(kind for kind in kinds if isinstance(kind, str))))
        if choices := [node["const"]] if "const" in node else _list(node.get("enum")):
            bounds.append(frozenset(map(type_of, choices)))
        if isinstance(reference := node.get("$ref"), str):
            bounds.append(self.of(resolved(self.root, reference), depth + 1))
        bounds += [self.of(part, depth + 1) for part in _list(node.get("allOf"))]
        for keyword in ("anyOf", "oneOf"):
            if parts := _list(node.get(keyword)):
                bounds.append(_union([self.of(part, depth + 1) for part in parts]))
        return _intersection(bounds)


class _PropertyTypes:
    """Visits each schema of an object once."""

    def __init__(self, types: _Types, name: str, is_conditional: bool) -> None:
        """With `is_conditional`, conditions count as if they held."""
        self._types = types
        self._name = name
        self._is_conditional = is_conditional
        self._visited: set[int] = set()

    def of(self, node: JsonValue, depth: int) -> tuple[frozenset[str] | None, bool]:
        """The types, and whether there is a schema for the property at all."""
        if not isinstance(node, dict) or depth > _MAX_DEPTH or id(node) in self._visited:
            return None, False
        self._visited.add(id(node))
        here = [
            _union([self._types.of(schema, depth + 1) for schema in schemas if schema is not False])
            for schemas in property_options(node, self._name)
            if not _says_nothing(schemas)
        ]
        inner = [self.of(part, depth + 1) for part in self._parts(node)]
        for keyword in ("anyOf", "oneOf"):
            options = [self.of(option, depth + 1) for option in _list(node.get(keyword))]
            if named := [types for types, is_named in options if is_named]:
                inner.append((_union(named), True))
        bounds = [*here, *(types for types, is_named in inner if is_named)]
        return _intersection(bounds), bool(bounds) or self._name in _object(node.get("properties"))

    def _parts(self, node: JsonObject) -> Iterator[JsonValue]:
        """What must hold too."""
        if isinstance(reference := node.get("$ref"), str):
            yield resolved(self._types.root, reference)
        yield from _list(node.get("allOf"))
        if self._is_conditional:
            yield from (node.get("then"), node.get("else"))
            yield from _object(node.get("dependentSchemas")).values()


def _says_nothing(schemas: list[JsonValue]) -> bool:
    return schemas in ([True], [{}], [False])


def _with_integers(types: frozenset[str]) -> frozenset[str]:
    return types | _NUMBERS if "number" in types else types


def _union(options: list[frozenset[str] | None]) -> frozenset[str] | None:
    known = [types for types in options if types is not None]
    return frozenset().union(*known) if len(known) == len(options) else None


def _intersection(bounds: list[frozenset[str] | None]) -> frozenset[str] | None:
    known = [types for types in bounds if types is not None]
    return frozenset.intersection(*known) if known else None


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}
