"""Closes the objects of JSON schemas: an answer has no keys but those that a schema names.

JSON Schema allows any other key where `additionalProperties` is absent, so a model would invent keys until its tokens
are used up. An object is closed where its `properties` are all that a schema says of its keys. It stays open where
another schema that holds for the same value, or another keyword, may speak of more keys: every text of a closed schema
is valid under the open one, and a schema that allows a value still does.

Source: JSON Schema 2020-12, "Core", sections 10.2 and 10.3.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.schema_places import SchemaPlace, resolved, subschemas
from shared.request.grammar import GrammarError

OPEN = "x-lockstep-open"
"""The keyword that, if true, leaves a schema, with all that is written in it, as it is."""

# What `properties` alone do not say of an object's keys.
_MORE_KEYS = frozenset(
    (
        *("additionalProperties", "const", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum"),
        *("if", "not", "patternProperties", "propertyNames", "then", "unevaluatedProperties"),
    )
)
# Keywords that say something of the keys, or of the parts, of a value for which others may hold too.
_SPEAKING = _MORE_KEYS | frozenset(
    (
        *("additionalItems", "contains", "items", "maxProperties", "minProperties", "prefixItems", "properties"),
        *("required", "unevaluatedItems"),
    )
)
# What may contradict the rest of a schema.
_COMBINED = frozenset(("$ref", "allOf", "anyOf", "if", "not", "oneOf"))
_OTHER_PROPERTIES = ("additionalProperties", "unevaluatedProperties")
_CONDITIONS = ("else", "if", "not", "then")
_OTHER_REFERENCES = frozenset(("$dynamicRef", "$recursiveRef"))
# More combinations of schemas for one value than any honest schema has.
_MAX_GROUPS = 5_000
_MAX_WORK = 1_000_000
_MAX_REFERENCES = 8
_MAX_NAMES_TO_TELL_APART = 16


def closed_schema(schema: JsonObject) -> JsonObject:
    """A copy of a schema, without additional properties where its objects have `properties` alone."""
    closed = copy.deepcopy(schema)
    for node in _Closing(closed).closable():
        node["additionalProperties"] = False
    return closed


def closed_arguments(schema: JsonObject) -> JsonObject:
    """The schema of the objects alone that a tool's schema allows, closed; without `properties` there are no arguments.

    Raises:
        GrammarError: it allows no object.
    """
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise GrammarError('"type" must allow objects')
    is_empty = not ({"$ref", "allOf", "anyOf", "oneOf", "properties"} | _MORE_KEYS) & schema.keys()
    return closed_schema({**schema, "type": "object", **({"properties": {}} if is_empty else {})})


class _Closing:
    """Finds the objects to close, by which schemas hold together for one value."""

    def __init__(self, root: JsonObject) -> None:
        self._root = root
        # What stays open.
        self._open: set[int] = set()
        self._closable: dict[int, JsonObject] = {}
        self._seen: set[frozenset[int]] = set()
        self._groups: list[list[JsonObject]] = []
        # Schemas and names that were visited.
        self._work = 0

    def closable(self) -> list[JsonObject]:
        nodes = list(self._reached([self._root]))
        if not all(map(self._is_followed, nodes)):
            return []
        self._open.update(id(part) for node in nodes if node.get(OPEN) is True for part in _written_in(node))
        # Closed, these would refuse less, or other values.
        self._open.update(map(id, self._reached([part for node in nodes for part in self._inverted(node)])))
        self._add([self._root])
        while self._groups:
            if len(self._seen) > _MAX_GROUPS or not self._read(self._groups.pop()):
                return []
        return [node for key, node in self._closable.items() if key not in self._open]

    def _is_followed(self, node: JsonObject) -> bool:
        """Whether it is known what its references name."""
        reference = node.get("$ref", "#")
        is_named = isinstance(reference, str) and resolved(self._root, reference) is not None
        is_resource = node is not self._root and any(isinstance(node.get(name), str) for name in ("$id", "id"))
        return is_named and not is_resource and not _OTHER_REFERENCES & node.keys()

    def _inverted(self, node: JsonObject) -> list[JsonValue]:
        """The schemas directly within one that must not hold, or of which not more than a number may."""
        parts = [node[keyword] for keyword in ("contains", "if", "not") if keyword in node]
        one_of = _list(node.get("oneOf"))
        return parts if self._are_disjoint(one_of) else [*parts, *one_of]

    def _add(self, schemas: Iterable[JsonValue]) -> None:
        """Add schemas that hold for one value."""
        group = {id(node): node for node in schemas if isinstance(node, dict)}
        if group and (key := frozenset(group)) not in self._seen:
            self._seen.add(key)
            self._groups.append(list(group.values()))

    def _read(self, group: list[JsonObject]) -> bool:
        """Read schemas that hold for one value, and add those of its parts; whether that is not too much work."""
        nodes = self._joined(group, ("allOf",))
        speaking = [node for node in nodes if _SPEAKING & node.keys()]
        branches = [_list(node[keyword]) for node in nodes for keyword in ("anyOf", "oneOf") if keyword in node]
        if len(branches) == 1 and not speaking:
            for branch in branches[0]:
                self._add([branch])
        elif not branches and len(speaking) == 1:
            if _has_only_properties(speaking[0]):
                self._closable[id(speaking[0])] = speaking[0]
            self._add_parts(speaking)
        else:
            nodes = self._joined(nodes, ("allOf", "anyOf", "oneOf"))
            self._open.update(map(id, nodes))
            self._add_parts(nodes)
        self._work += len(nodes)
        return self._work <= _MAX_WORK

    def _joined(self, group: Iterable[JsonObject], keywords: tuple[str, ...]) -> list[JsonObject]:
        """The schemas, and all that hold for the same value by references, conditions and these keywords."""
        found: dict[int, JsonObject] = {}
        waiting: list[JsonValue] = list(group)
        while waiting:
            node = waiting.pop()
            if not isinstance(node, dict) or id(node) in found:
                continue
            found[id(node)] = node
            if isinstance(reference := node.get("$ref"), str):
                waiting.append(resolved(self._root, reference))
            for keyword in keywords:
                waiting += _list(node.get(keyword))
            waiting += [node[keyword] for keyword in _CONDITIONS if keyword in node]
            for keyword in ("dependencies", "dependentSchemas"):
                waiting += _object(node.get(keyword)).values()
        return list(found.values())

    def _add_parts(self, nodes: list[JsonObject]) -> None:
        """Add the schemas of the parts of a value for which all of these hold."""
        maps = [_object(node.get("properties")) for node in nodes]
        others = [node[key] for node in nodes for key in _OTHER_PROPERTIES if key in node]
        patterned = [part for node in nodes for part in _object(node.get("patternProperties")).values()]
        overlapping = [*others, *patterned] if len(nodes) > 1 or patterned else []
        names = dict.fromkeys(name for properties in maps for name in properties)
        self._work += len(names) * (len(nodes) + len(overlapping))
        if self._work > _MAX_WORK:
            return
        for name in names:
            self._add([*(properties[name] for properties in maps if name in properties), *overlapping])
        self._add([*others, *patterned])
        items = [item for node in nodes for item in _items(node)]
        if len(nodes) > 1 or "contains" in nodes[0]:
            self._add([*items, *(node.get("contains") for node in nodes)])
        else:
            for item in items:
                self._add([item])

    def _are_disjoint(self, branches: list[JsonValue]) -> bool:
        """Whether it is certain that no value fits two: their types differ, or a key that all demand."""
        nodes = [self._target(branch) for branch in branches]
        kinds = [_kinds(node) for node in nodes]
        objects = [node for node, kind in zip(nodes, kinds, strict=True) if kind == {"object"}]
        if len(objects) < 2:
            return _differ(kinds)
        others = [kind for kind in kinds if kind != {"object"}]
        names = set.intersection(*({str(name) for name in _list(node.get("required"))} for node in objects))
        maps = [_object(node.get("properties")) for node in objects]
        return _differ([*others, {"object"}]) and any(
            _differ([_words(self._target(properties.get(name))) for properties in maps])
            for name in sorted(names)[:_MAX_NAMES_TO_TELL_APART]
        )

    def _target(self, schema: JsonValue) -> JsonObject:
        """The schema, or what it refers to; empty if that is none."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
                break
            schema = resolved(self._root, reference)
        return _object(schema)

    def _reached(self, schemas: list[JsonValue]) -> Iterator[JsonObject]:
        """The schemas, all that are written in them, and those that they refer to."""
        waiting, seen = [SchemaPlace(schema, "#", 2020) for schema in schemas], set()
        while waiting:
            place = waiting.pop()
            if isinstance(place.node, dict) and id(place.node) not in seen:
                seen.add(id(place.node))
                yield place.node
                waiting += subschemas(place)
                if isinstance(reference := place.node.get("$ref"), str):
                    waiting.append(SchemaPlace(resolved(self._root, reference), "#", 2020))


def _has_only_properties(node: JsonObject) -> bool:
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or _MORE_KEYS & node.keys():
        return False
    if not all(isinstance(name, str) and name in properties for name in required):
        return False
    least = node.get("minProperties", 0)
    # Enough keys of which it is certain that they may be there.
    possible = sum(name in required or _has_value(part) for name, part in properties.items())
    return isinstance(least, int | float) and least <= possible


def _has_value(schema: JsonValue) -> bool:
    """Whether it is certain that some value fits, however its bounds are."""
    if not isinstance(schema, dict):
        return schema is True
    if _COMBINED & schema.keys():
        return False
    properties, least = _object(schema.get("properties")), schema.get("minProperties", 0)
    required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
    is_enough = isinstance(least, int | float) and least <= len(required)
    return schema.get("type") != "object" or (is_enough and all(_has_value(properties.get(name)) for name in required))


def _written_in(schema: JsonObject) -> Iterator[JsonObject]:
    """The schema and all that are written in it."""
    waiting = [SchemaPlace(schema, "#", 2020)]
    while waiting:
        place = waiting.pop()
        if isinstance(place.node, dict):
            yield place.node
            waiting += subschemas(place)


def _items(node: JsonObject) -> list[JsonValue]:
    items = node.get("items")
    listed = items if isinstance(items, list) else [items]
    return [*listed, *_list(node.get("prefixItems")), node.get("additionalItems"), node.get("unevaluatedItems")]


def _kinds(node: JsonObject) -> set[str]:
    """The types that it allows, as if there were one of numbers; empty if it does not say."""
    if _words(node):
        return {"string"}
    kinds = node.get("type")
    named = filter(_is_text, kinds if isinstance(kinds, list) else [kinds])
    return {"number" if kind == "integer" else str(kind) for kind in named}


def _words(node: JsonObject) -> set[str]:
    """The texts that are its only values; empty if it has others."""
    values = [node["const"]] if "const" in node else _list(node.get("enum"))
    return {str(value) for value in values} if all(map(_is_text, values)) else set()


def _differ(sets: list[set[str]]) -> bool:
    """Whether all have something and no two have anything in common."""
    return all(sets) and len(set().union(*sets)) == sum(map(len, sets))


def _is_text(value: JsonValue) -> bool:
    return isinstance(value, str)


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}
