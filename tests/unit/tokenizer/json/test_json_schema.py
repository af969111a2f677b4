"""Schemas that are refused although the grammar library would accept them."""

from __future__ import annotations

import contextlib
import copy

import pytest

from services.tokenizer.json.ecma_regex import full_match_regex
from services.tokenizer.json.json_schema import FORMATS, held_schema
from services.tokenizer.json.json_values import JsonObject, JsonValue
from services.tokenizer.json.text_formats import WITH_DATES
from shared.request.grammar import GrammarError


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string", "pattern": r"^[^\x00-\x1f\"]+$"},
        {"type": "string", "pattern": r"^\[[\x00a]\\x01\n\t\f\u0041$"},
        {"type": "object", "patternProperties": {r"^[\x01\x02b]a": True}},
        {"description": "a\x00", "title": "\x1b", "$comment": "\x7f", "default": "\x01", "examples": ["\x02"]},
        {"deprecated": True, "x-order": "\x01", "contentMediaType": "text/plain"},
        {"enum": ["a\nb\t\b\f\r", "é"]},
        {"properties": {"pattern": {"type": "string"}, "minProperties": {"type": "integer"}}},
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        {"enum": [2**64 - 1, -(2**63), 2**70]},
        {"minProperties": 1},
        {"minProperties": 3, "required": ["a", "b"]},
    ],
)
def test_what_the_library_handles_well_is_accepted(schema: JsonObject) -> None:
    held_schema({"properties": {"a": schema}, "anyOf": [schema]})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"minProperties": 2}, "minProperties"),
        ({"minProperties": 4.0, "required": ["a", "b"]}, "minProperties"),
        ({"type": "integer", "minimum": 10**20}, '"minimum" 100000000000000000000 is not supported'),
        ({"type": ["null", "integer"], "exclusiveMaximum": -1e19}, "exclusiveMaximum.* at most 2\\*\\*53"),
        ({"const": 10**30}, r"10{19}… \(31 characters\) is not supported: whole numbers have at most 64 bits"),
        ({"enum": [[2**64 + 1]]}, "18446744073709551617 is not supported"),
        ({"const": "a\x00b"}, "control characters"),
        ({"enum": [{"a": ["\x7f"]}]}, "control characters"),
        ({"properties": {"a\x1f": {}}}, "control characters"),
        ({"required": ["a\x1f"]}, "control characters"),
        ({"pattern": r"a\x01b"}, "control character"),
        ({"pattern": r"a\u001Fb"}, "control character"),
        ({"pattern": r"[a-z]\u{7f}"}, "control character"),
        ({"pattern": r"\[\\\cAb]"}, "control character"),
        ({"pattern": r"x[\x01]"}, "control character"),
        ({"pattern": r"x[\x01-\x03]"}, "control character"),
        ({"pattern": "a\\vb"}, "control character"),
        ({"patternProperties": {r"^\x00": {}}}, "control character"),
        ({"pattern": "(?=a)"}, "look-ahead is not supported"),
        ({"uniqueItems": True}, '"uniqueItems" is not supported'),
        ({"properties": {"b": {"not": {}}}}, '"not" is not supported, at .*/properties/b/not$'),
    ],
)
def test_a_constraint_that_could_break_the_schema_is_refused_at_any_depth(schema: JsonObject, message: str) -> None:
    nested: list[JsonObject] = [schema, {"properties": {"a": schema}}, {"$defs": {"a": {"anyOf": [schema, True]}}}]
    for whole in nested:
        with pytest.raises(GrammarError, match=message):
            held_schema(whole)


@pytest.mark.parametrize("unit", ["[", "[a", "[\\x", "\\"])
def test_a_hostile_pattern_is_read_once(unit: str) -> None:
    # If it were read again from each character, it would take hours.
    with contextlib.suppress(GrammarError):
        held_schema({"type": "string", "pattern": unit * 200_000})


IDLE: list[JsonObject] = [
    {"format": "idn-email"},
    {"format": "color"},
    {"uniqueItems": False},
    {"not": False},
    {"if": {"type": "string"}},
    {"then": {"type": "string"}, "else": False},
    {"if": {}, "then": {}, "else": True},
    {"minContains": 2, "maxContains": 1},
    {"contains": {"type": "string"}, "minContains": 0},
    {"propertyNames": {}, "unevaluatedProperties": True, "unevaluatedItems": {}, "dependentRequired": {}},
    {"$dynamicAnchor": "a", "$recursiveAnchor": True},
]


@pytest.mark.parametrize("idle", IDLE, ids=str)
def test_what_constrains_nothing_is_left_out_wherever_a_schema_is(idle: JsonObject) -> None:
    held = held_schema(places_of(idle))
    assert held.not_held == ()
    assert leftovers(held.schema, idle) == []


def places_of(schema: JsonObject) -> JsonObject:
    """A schema with another in each place that may have one."""
    return {
        **copy.deepcopy(schema),
        "$defs": {"a": copy.deepcopy(schema), "format": {"items": copy.deepcopy(schema)}},
        "definitions": {"b": copy.deepcopy(schema)},
        "properties": {"format": {"additionalProperties": copy.deepcopy(schema)}, "x": {"$ref": "#/x-mine/0"}},
        "patternProperties": {"^y": copy.deepcopy(schema)},
        "anyOf": [copy.deepcopy(schema)],
        "allOf": [{"oneOf": [copy.deepcopy(schema)]}],
        "prefixItems": [copy.deepcopy(schema)],
        "x-mine": [copy.deepcopy(schema)],
    }


def leftovers(value: JsonValue, idle: JsonObject) -> list[JsonValue]:
    """The keywords of `idle` that are still there, with a value of its."""
    if isinstance(value, list):
        return [left for item in value for left in leftovers(item, idle)]
    if not isinstance(value, dict):
        return []
    return [name for name in value if name in idle and value[name] == idle[name]] + [
        left for item in value.values() for left in leftovers(item, idle)
    ]


def test_data_and_names_are_no_keywords() -> None:
    schema: JsonObject = {
        "const": {"format": "color", "pattern": "(?=a)", "uniqueItems": True, "x-guidance": {}},
        "enum": [{"format": "color"}],
        "default": {"format": "color"},
        "examples": [{"not": {}}],
        "properties": {"format": {"const": "color"}, "uniqueItems": True, "x-guidance": True, "pattern": {}},
        "required": ["format", "not"],
    }
    assert held_schema(schema).schema == schema


def test_a_whole_number_may_have_a_fraction_of_zero() -> None:
    schema: JsonObject = {"items": {"minLength": 2.0, "maxItems": 3.5}}
    assert repr(held_schema(schema).schema) == "{'items': {'minLength': 2, 'maxItems': 3.5}}"


def test_known_formats_stay() -> None:
    schema: JsonObject = {"anyOf": [{"format": name} for name in sorted(FORMATS)]}
    held = held_schema(schema).schema
    assert isinstance(held, dict)
    assert isinstance(options := held["anyOf"], list)
    assert [option["format"] for option in options if isinstance(option, dict)] == sorted(FORMATS)
    assert [option for option in options if isinstance(option, dict) and set(option) != {"format"}] == [
        {"format": name, "pattern": f"^(?:{WITH_DATES[name]})$"} for name in ("date", "date-time")
    ]


def test_a_pattern_beside_a_date_stays() -> None:
    schema: JsonObject = {"format": "date", "pattern": "^2", "allOf": [{"minLength": 1}]}
    assert held_schema(schema).schema == {
        "format": "date",
        "pattern": f"^(?:{full_match_regex('^2')})$",
        "allOf": [{"minLength": 1}, {"pattern": f"^(?:{WITH_DATES['date']})$"}],
    }


@pytest.mark.parametrize(
    ("draft", "is_known"), [("http://json-schema.org/draft-04/schema#", False), ("https://other", True)]
)
def test_a_keyword_of_a_later_draft_constrains_nothing(draft: str, is_known: bool) -> None:
    schema: JsonObject = {"$schema": draft, "contains": {"type": "string"}}
    if not is_known:
        assert held_schema(schema).not_held == ()
        return
    with pytest.raises(GrammarError, match='"contains" is not supported, at #/contains'):
        held_schema(schema)


def test_a_keyword_is_idle_only_in_a_draft_that_has_the_one_that_makes_it_so() -> None:
    schema: JsonObject = {"contains": {"type": "string"}, "minContains": 0}
    assert held_schema(schema).schema == {}
    with pytest.raises(GrammarError, match='"contains" is not supported'):
        held_schema({"$schema": "http://json-schema.org/draft-07/schema#", **schema})


@pytest.mark.parametrize("reference", ["#/const", "#/enum/0", "#/patternProperties/%5Ea"])
def test_a_reference_to_what_is_no_schema_is_refused(reference: str) -> None:
    schema: JsonObject = {"const": {"format": "x"}, "enum": [{}], "patternProperties": {"^a": {}}}
    with pytest.raises(GrammarError, match=r"a reference to what is not a schema is not supported, at #/items/\$ref"):
        held_schema({**schema, "items": {"$ref": reference}})


def test_without_strictness_what_cannot_be_held_is_left_out_and_named() -> None:
    schema: JsonObject = {
        "type": "object",
        "properties": {
            "a/b": {"type": "array", "uniqueItems": True, "contains": {"const": 1}, "minItems": 2},
            "c": {"type": "string", "pattern": "^(?=.*x)y", "maxLength": 3},
            "d": {"type": "integer", "maximum": 2**60},
        },
        "patternProperties": {r"^(x)\1": {"type": "null"}, "^z": {"not": {}}},
        "minProperties": 5,
    }
    before = copy.deepcopy(schema)
    held = held_schema(schema, is_strict=False)
    assert schema == before
    assert held.schema == {
        "type": "object",
        "properties": {
            "a/b": {"type": "array", "minItems": 2},
            "c": {"type": "string", "maxLength": 3},
            "d": {"type": "integer"},
        },
        "patternProperties": {"^(?:z(?s:.*))$": {}},
    }
    assert set(held.not_held) == {
        "#/properties/a~1b/uniqueItems",
        "#/properties/a~1b/contains",
        "#/properties/c/pattern",
        "#/properties/d/maximum",
        r"#/patternProperties/^(x)\1",
        "#/patternProperties/^z/not",
        "#/minProperties",
    }


@pytest.mark.parametrize("schema", [{"const": "\x00"}, {"pattern": "("}, {"x-guidance": {}}, {"enum": [10**30]}])
def test_without_strictness_a_malformed_schema_is_still_refused(schema: JsonObject) -> None:
    with pytest.raises(GrammarError):
        held_schema(schema, is_strict=False)
