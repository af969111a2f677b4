"""Objects whose properties are all that their schema says of keys are closed, and no others."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.json.closed_schema import OPEN, closed_arguments, closed_schema

CLOSED = {"additionalProperties": False}
PERSON: dict[str, Any] = {"type": "object", "properties": {"name": {}, "age": {}}, "required": ["name"]}
CITY: dict[str, Any] = {"properties": {"city": {}}}
KIND_A = {"properties": {"kind": {"const": "a"}}, "required": ["kind"], "type": "object"}
KIND_B = {"properties": {"kind": {"const": "b"}, "x": CITY}, "required": ["kind"], "type": "object"}


@pytest.mark.parametrize(
    ("schema", "num_closed"),
    [
        (PERSON, 1),
        ({"properties": {}}, 1),
        ({**PERSON, "minProperties": 2}, 1),
        ({"items": PERSON, "prefixItems": [PERSON, CITY]}, 3),
        ({"type": "object", "properties": {"a": PERSON, "b": {"items": CITY}}}, 3),
        ({**PERSON, "additionalProperties": CITY}, 1),
        ({**CITY, "patternProperties": {"^x": PERSON}}, 1),
        # What pydantic writes: references with notes beside them, and unions of models.
        ({"properties": {"a": {"$ref": "#/$defs/P", "description": "d"}}, "$defs": {"P": PERSON}}, 2),
        ({"properties": {"a": {"allOf": [{"$ref": "#/$defs/P"}], "default": {}}}, "$defs": {"P": PERSON}}, 2),
        ({"anyOf": [PERSON, CITY, {"type": "null"}], "title": "t"}, 2),
        ({"type": "object", "anyOf": [PERSON, {"anyOf": [CITY]}]}, 2),
        ({"oneOf": [KIND_A, KIND_B], "discriminator": {"propertyName": "kind"}}, 3),
        ({"oneOf": [PERSON, {"type": "null"}]}, 1),
        ({"properties": {"child": {"$ref": "#"}, "name": {}}, "minProperties": 1}, 1),
    ],
)
def test_an_object_with_properties_alone_is_closed(schema: dict[str, Any], num_closed: int) -> None:
    before = copy.deepcopy(schema)
    closed = closed_schema(schema)
    assert schema == before
    assert str(closed).count(str(CLOSED)[1:-1]) == num_closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**PERSON, "additionalProperties": True},
        {**PERSON, "unevaluatedProperties": True},
        {**PERSON, "patternProperties": {"^x": True}},
        {**PERSON, "propertyNames": {"maxLength": 3}},
        {**PERSON, "minProperties": 3},
        {**PERSON, "required": ["name", "other"]},
        {**PERSON, "enum": [{"name": 1, "other": 2}]},
        {**PERSON, "dependentRequired": {"name": ["other"]}},
        {**PERSON, OPEN: True},
        {"properties": {"a": PERSON}, OPEN: True},
        {**PERSON, "anyOf": [{"required": ["name"]}, {"required": ["other"]}]},
        {**PERSON, "allOf": [CITY]},
        {**PERSON, "if": {"required": ["age"]}, "then": CITY},
        {**PERSON, "$ref": "#/$defs/C", "$defs": {"C": CITY}},
        {"allOf": [PERSON, CITY]},
        {"allOf": [{"anyOf": [PERSON, CITY]}, {"required": ["name"]}]},
        {"allOf": [{"properties": {"a": PERSON}}, {"properties": {"a": CITY}}]},
        {"oneOf": [PERSON, CITY]},
        {"not": PERSON},
        {"items": True, "contains": PERSON, "maxContains": 1},
        {"minProperties": 1, "properties": {"child": {"$ref": "#"}}},
        {"minProperties": 1, "properties": {"child": False}},
        {"$ref": "#person", "$defs": {"P": {"$anchor": "person", **PERSON}}},
        {"$dynamicRef": "#p", "$defs": {"P": {"$dynamicAnchor": "p", **PERSON}}},
    ],
)
def test_an_object_of_which_more_is_said_stays_open(schema: dict[str, Any]) -> None:
    assert closed_schema(schema) == schema


def test_a_definition_that_is_joined_anywhere_stays_open_everywhere() -> None:
    schema: dict[str, Any] = {
        "properties": {"a": {"$ref": "#/$defs/P"}, "b": {"allOf": [{"$ref": "#/$defs/P"}, CITY]}},
        "$defs": {"P": PERSON},
    }
    assert closed_schema(schema) == {**schema, **CLOSED}


@pytest.mark.parametrize("schema", [{}, {"type": "object"}, {"description": "nothing"}])
def test_a_tool_without_properties_has_no_arguments(schema: dict[str, Any]) -> None:
    assert closed_arguments(schema) == {**schema, "type": "object", "properties": {}, **CLOSED}


def test_schemas_that_would_take_too_much_work_stay_open() -> None:
    names = [f"p{number}" for number in range(14)]
    branches = [{"properties": {name: {"$ref": f"#/$defs/{name}"}, "x": {"$ref": f"#/$defs/{name}"}}} for name in names]
    definitions = {name: {"allOf": [{"$ref": f"#/$defs/{each}"} for each in names], **PERSON} for name in names}
    joined: dict[str, Any] = {"allOf": [*branches, PERSON], "$defs": definitions}
    many = range(10_000)
    crossed: dict[str, Any] = {
        "properties": {"a": PERSON, **{f"p{number}": {} for number in many}},
        "patternProperties": {f"^q{number}": {} for number in many},
    }
    assert (closed_schema(joined), closed_schema(crossed)) == (joined, crossed)


NAMES = ("a", "b", "c")
REFERENCE = {"$ref": "#/$defs/d"}
LEAVES = st.sampled_from([True, False, {"type": "integer"}, {"const": "x"}, {"const": "y"}])


def _objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)
    return st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(st.sampled_from(NAMES), parts, max_size=2),
            "required": names,
            "minProperties": st.integers(0, 2),
            "additionalProperties": parts,
            "anyOf": st.lists(parts, min_size=1, max_size=2),
            "oneOf": st.lists(parts, min_size=1, max_size=2),
            "allOf": st.lists(parts, min_size=1, max_size=2),
            "not": parts,
            "$ref": st.just(REFERENCE["$ref"]),
        },
    )


def without_ref(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without a reference of its own."""
    return {name: value for name, value in schema.items() if name != "$ref"}


# A definition that refers to itself would never end.
SCHEMAS = st.builds(
    lambda root, part: {**root, "$defs": {"d": part}},
    _objects(st.recursive(LEAVES | st.just(REFERENCE), _objects, max_leaves=6)),
    _objects(LEAVES).map(without_ref),
)
_SMALL: list[Any] = [1, "x", "y", {}]


def _values(parts: list[Any]) -> list[Any]:
    pairs = itertools.product([*parts, None], repeat=len(NAMES))
    return [{name: value for name, value in zip(NAMES, pair, strict=True) if value is not None} for pair in pairs]


VALUES = [*_SMALL, *_values(_SMALL), *_values([{"a": 1}, {"a": "x", "c": {}}])]


@settings(deadline=None)
@given(schema=SCHEMAS)
def test_what_fits_a_closed_schema_fits_the_open_one(schema: dict[str, Any]) -> None:
    before, after = (jsonschema.Draft202012Validator(each) for each in (schema, closed_schema(schema)))
    assert [value for value in VALUES if after.is_valid(value) and not before.is_valid(value)] == []


@settings(deadline=None)
@given(
    schema=st.builds(
        lambda root, part: {**root, "$defs": {"d": part}}, _objects(LEAVES), _objects(LEAVES).map(without_ref)
    )
)
def test_a_schema_that_fits_something_still_does_when_it_is_closed(schema: dict[str, Any]) -> None:
    before, after = (jsonschema.Draft202012Validator(each) for each in (schema, closed_schema(schema)))
    assert not any(map(before.is_valid, VALUES)) or any(map(after.is_valid, VALUES))
