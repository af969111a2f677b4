"""The objects that a tool's schema allows, as lists of arguments: for families that write arguments one by one.

Source: JSON Schema 2020-12, "Core", sections 10.2 and 10.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from services.tokenizer.json.json_schema import held_schema
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.pattern_search import is_found
from services.tokenizer.json.schema_places import resolved
from services.tokenizer.json.schema_types import property_options, types_of
from shared.request.grammar import GrammarError

# How many references and combinations are followed, and how many lists there may be.
_MAX_DEPTH = 32
_MAX_LISTS = 64

# The schemas that all hold for one list.
_Nodes = tuple[JsonObject, ...]


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a list."""

    name: str
    schema: JsonValue
    is_required: bool


@dataclass(frozen=True, slots=True)
class OtherArguments:
    """Arguments without a name in the schema."""

    schema: JsonValue
    pattern: str | None
    """What is found in their names; None for any name."""
    excluded_patterns: tuple[str, ...]
    """What is not."""
    excluded_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArgumentList:
    """Arguments in the order in which they come, after which others may come."""

    arguments: tuple[Argument, ...]
    others: tuple[OtherArguments, ...]


def argument_lists(root: JsonObject) -> list[ArgumentList]:
    """The lists of arguments that a schema allows: those that it names, in its order.

    Others follow where one schema alone describes them ("additionalProperties" as a schema, "patternProperties").

    Raises:
        GrammarError: no object fits, or the schema asks for what no grammar can guarantee.
    """
    held_schema(root)
    ways = _Reader(root).nodes(root, 0)
    others = _others(ways)
    lists = [
        ArgumentList(arguments, others if _may_have_others(nodes) else ())
        for nodes in ways
        if (arguments := _arguments(nodes)) is not None
    ]
    if not lists:
        raise GrammarError("no arguments fit")
    return lists


class _Reader:
    """Follows what a schema combines."""

    def __init__(self, root: JsonObject) -> None:
        self._root = root

    def nodes(self, node: JsonValue, depth: int) -> list[_Nodes]:
        """The ways to fulfil a schema: empty if no object does."""
        if not isinstance(node, dict):
            return [] if node is False else [()]
        if depth > _MAX_DEPTH:
            raise GrammarError("it is nested too deep, or refers to itself")
        kinds = node.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            return []
        factors: list[list[_Nodes]] = [[(node,)]]
        choices = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(choices, list):
            objects: list[_Nodes] = [(_exactly(choice),) for choice in choices if isinstance(choice, dict)]
            factors.append(objects)
        if isinstance(reference := node.get("$ref"), str):
            if (target := resolved(self._root, reference)) is None:
                raise GrammarError("a reference leads nowhere")
            factors.append(self.nodes(target, depth + 1))
        factors += [self.nodes(part, depth + 1) for part in _list(node.get("allOf"))]
        if options := _list(node.get("anyOf")):
            factors.append([nodes for option in options for nodes in self.nodes(option, depth + 1)])
        if options := _list(node.get("oneOf")):
            factors.append(self._one_of([self.nodes(option, depth + 1) for option in options]))
        return _combinations(factors)

    def _one_of(self, options: list[list[_Nodes]]) -> list[_Nodes]:
        """The ways to fulfil one option and no other: where they do not exclude each other, without an argument that
        the other requires.
        """
        found: list[_Nodes] = []
        for number, ways in enumerate(options):
            others = [other for index, each in enumerate(options) if index != number for other in each]
            for nodes in ways:
                absent = [self._difference(nodes, other) for other in others]
                without: JsonObject = {"properties": {name: False for name in absent if name is not None}}
                found.append((*nodes, without))
        return found

    def _difference(self, nodes: _Nodes, other: _Nodes) -> str | None:
        """An argument that `other` requires and `nodes` does not; None if they exclude each other."""
        ours, theirs = _required(nodes), _required(other)
        for name in (*ours, *theirs):
            schemas, others = _schemas(nodes, name), _schemas(other, name)
            if any(schema is False for schema in (others if name in ours else schemas)):
                return None
            if name in ours and name in theirs and self._are_disjoint(schemas, others):
                return None
        if not (names := [name for name in theirs if name not in ours]):
            raise GrammarError('"oneOf" is supported only where its options are clearly mutually exclusive')
        return names[0]

    def _are_disjoint(self, schemas: list[JsonValue], others: list[JsonValue]) -> bool:
        for schema, other in product(schemas, others):
            values, other_values = self._choices(schema, 0), self._choices(other, 0)
            if values is not None and other_values is not None and not any(each in other_values for each in values):
                return True
            types, other_types = types_of(schema, self._root), types_of(other, self._root)
            if types is not None and other_types is not None and not types & other_types:
                return True
        return False

    def _choices(self, schema: JsonValue, depth: int) -> list[JsonValue] | None:
        """The values that a schema lists; None if it lists none."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return None
        if "const" in schema:
            return [schema["const"]]
        if isinstance(choices := schema.get("enum"), list):
            return choices
        reference = schema.get("$ref")
        return self._choices(resolved(self._root, reference), depth + 1) if isinstance(reference, str) else None


def _arguments(nodes: _Nodes) -> tuple[Argument, ...] | None:
    """The arguments of one list; None if no object fits."""
    required = _required(nodes)
    named = [name for node in nodes if isinstance(names := node.get("properties"), dict) for name in names]
    arguments = []
    for name in dict.fromkeys([*named, *required]):
        schemas = _schemas(nodes, name)
        if any(schema is False for schema in schemas):
            if name in required:
                return None
            continue
        combined: JsonValue = schemas[0] if len(schemas) == 1 else {"allOf": schemas} if schemas else True
        arguments.append(Argument(name, combined, name in required))
    for node in nodes:
        least, most = node.get("minProperties", 0), node.get("maxProperties", len(arguments))
        if isinstance(least, int | float) and least > len(required):
            raise GrammarError('with this model, "minProperties" is supported only up to the number of required ones')
        if isinstance(most, int | float) and most < len(arguments):
            raise GrammarError('with this model, "maxProperties" is supported only from the number of properties on')
    return tuple(arguments)


def _others(ways: list[_Nodes]) -> tuple[OtherArguments, ...]:
    """What describes unnamed arguments; empty if several schemas do, or if a pattern is too costly to search for."""
    nodes = list({id(node): node for way in ways for node in way}.values())
    open_nodes = [node for node in nodes if _describes_others(node)]
    if len(open_nodes) != 1:
        return ()
    by_pattern, additional = _object(open_nodes[0].get("patternProperties")), open_nodes[0].get("additionalProperties")
    if any(is_found(pattern, "") is None for pattern in by_pattern):
        return ()
    named = (name for node in nodes for name in (*_object(node.get("properties")), *_required((node,))))
    names = tuple(dict.fromkeys(named))
    others = [
        OtherArguments(schema, pattern, tuple(other for other in by_pattern if other != pattern), names)
        for pattern, schema in by_pattern.items()
        if schema is not False
    ]
    if isinstance(additional, dict) and additional:
        others.append(OtherArguments(additional, None, tuple(by_pattern), names))
    return tuple(others)


def _may_have_others(nodes: _Nodes) -> bool:
    is_closed = any(node.get("additionalProperties") is False and not node.get("patternProperties") for node in nodes)
    return not is_closed and any(map(_describes_others, nodes)) and not any("maxProperties" in node for node in nodes)


def _describes_others(node: JsonObject) -> bool:
    return bool(_object(node.get("patternProperties")) or _object(node.get("additionalProperties")))


def _schemas(nodes: _Nodes, name: str) -> list[JsonValue]:
    """The schemas of an argument, of which all hold, without those that allow everything."""
    schemas = []
    for node in nodes:
        for options in property_options(node, name):
            if len(options) > 1:
                raise GrammarError('a pattern of "patternProperties" is too costly to search for in a name')
            schemas += [schema for schema in options if schema is not True and schema != {}]
    return schemas


def _required(nodes: _Nodes) -> list[str]:
    names = (name for node in nodes for name in _list(node.get("required")) if isinstance(name, str))
    return list(dict.fromkeys(names))


def _exactly(choice: JsonObject) -> JsonObject:
    """The schema of one object."""
    properties: JsonObject = {name: {"const": value} for name, value in choice.items()}
    return {"properties": properties, "required": list(choice), "additionalProperties": False}


def _combinations(factors: list[list[_Nodes]]) -> list[_Nodes]:
    """One way of each factor."""
    ways: list[_Nodes] = [()]
    for factor in factors:
        if len(ways) * len(factor) > _MAX_LISTS:
            raise GrammarError(f"it has too many options: at most {_MAX_LISTS}")
        ways = [(*way, *nodes) for way in ways for nodes in factor]
    return ways


def _object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
