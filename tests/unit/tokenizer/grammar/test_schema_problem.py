"""Which part of a schema is refused, and what is held of it without strictness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.grammar.grammar_source import FormOptions
from services.tokenizer.grammar.grammar_trial import GrammarTrial
from services.tokenizer.json.closed_schema import OPEN
from services.tokenizer.json.json_schema import FORMATS
from shared.request.grammar import GrammarError, GrammarLibrary
from tests.support.models.tiny_tokenizer import IM_END_ID

RELAXED = FormOptions(is_strict=False)
FINE: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string"}}}
OVERLAPPING: dict[str, Any] = {"oneOf": [{"type": "integer"}, {"minimum": 2}]}
DISJOINT: dict[str, Any] = {"oneOf": [{"type": "integer"}, {"type": "string"}]}


@pytest.fixture(scope="module")
def trial(model_dir: Path) -> GrammarTrial:
    """Tries grammars in this process."""
    return GrammarTrial(GrammarLibrary(model_dir, (IM_END_ID,)))


def fits(trial: GrammarTrial, schema: Any, text: str, options: FormOptions) -> bool:
    """Whether the schema's grammar allows a text."""
    library = trial._library
    matcher = library.compile(trial.run("json_schema", json.dumps(schema), options).text)
    token_ids = library.tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": FINE, "b/c": OVERLAPPING}}, '"oneOf" is supported only .*, at #/properties/b~1c'),
        ({"$defs": {"d": {"items": OVERLAPPING}}, "items": {"$ref": "#/$defs/d"}}, r"at #/\$defs/d/items"),
        ({"anyOf": [FINE, DISJOINT, {"items": {"not": {}}}]}, r'"not" is not supported, at #/anyOf/2/items/not'),
        ({"items": {"prefixItems": [{}, {"type": "text"}]}}, "Invalid type: text, at #/items/prefixItems/1"),
        ({"items": {"type": "string", "pattern": "^a(?=b)"}}, "look-ahead is not supported.*, at #/items/pattern"),
        ({"items": {"$ref": "#/nowhere"}}, "a reference leads nowhere, at #/items"),
        ({"items": {"$ref": "https://example.com/s"}}, "a reference to another document is not supported, at #/items"),
        ({"properties": {"a": {"minLength": -1}}}, r"Expected positive integer .*, at #/properties/a"),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}},
                "required": ["a"],
            },
            "at #/properties/a",
        ),
        ({"properties": {"a": {"patternProperties": {"^a": {}, "b$": {}}}}}, "not disjoint, at #/properties/a"),
        ({"items": {"patternProperties": {"^a": {"type": "x"}}}}, "Invalid type: x, at #/items/patternProperties$"),
        ({"properties": {"a": {"const": "\x00"}}}, "control characters are not supported, at #/properties/a/const"),
        (
            {"properties": {f"p{n}": OVERLAPPING if n in (7, 80) else DISJOINT for n in range(100)}},
            "at #/properties/p80",
        ),
        ({"items": [FINE] * 40 + [{"minItems": "many"}] + [FINE] * 40}, "at #/items/40"),
    ],
)
def test_a_refusal_says_where(trial: GrammarTrial, schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as caught:
        trial.run("json_schema", json.dumps(schema))
    assert "%json" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "not_held", "good", "bad"),
    [
        ({}, [], ["1"], []),
        (OVERLAPPING, ["#/oneOf"], ["1", "3.5"], ['"a']),
        ({"items": DISJOINT, "type": "array"}, [], ["[1]"], ["[null]"]),
        ({"properties": {"a": DISJOINT, "b": OVERLAPPING}}, ["#/properties/b/oneOf"], ['{"b": 3}'], ['{"a": null}']),
        ({"anyOf": [{"oneOf": [{"type": "string"}, {"type": "string", "minLength": 1}]}], "not": {}},
         ["#/not", "#/anyOf/0/oneOf"], ['"a"'], ["1"]),
        ({"oneOf": [{"minimum": 1}, {"maximum": 5}], "anyOf": [{"type": "integer"}, {"type": "null"}]},
         ["#/oneOf"], ["3", "null"], ["x"]),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
         ["#/uniqueItems"], ["[1, 1]"], ['["a"]']),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "required": [], OPEN: True},
         ["#/minProperties"], ["{}"], ["1"]),
        ({"type": "string", "pattern": r"^(?!x)[a-c]+$"}, ["#/pattern"], ['"x"'], ["1"]),
        ({"type": "object", "patternProperties": {"^a": {"type": "null"}, "b$": {}}},
         ["#/patternProperties"], ['{"ab": 1}'], ["1"]),
        ({"type": "object", "dependentRequired": {"a": ["b"]}, "properties": {"a": {"type": "null"}}},
         ["#/dependentRequired"], ['{"a": null}'], ['{"a": 1}']),
    ],
)  # fmt: skip
def test_what_can_be_held_is_and_the_rest_is_named(
    trial: GrammarTrial, schema: Any, not_held: list[str], good: list[str], bad: list[str]
) -> None:
    assert sorted(trial.run("json_schema", json.dumps(schema), RELAXED).not_held) == sorted(not_held)
    assert [text for text in good if not fits(trial, schema, text, RELAXED)] == []
    assert [text for text in bad if fits(trial, schema, text, RELAXED)] == []


@pytest.mark.parametrize("schema", [{"type": "text"}, {"$ref": "#/nowhere"}, {"pattern": "("}, {"const": "\x01"}])
def test_a_malformed_schema_is_refused_without_strictness_too(trial: GrammarTrial, schema: Any) -> None:
    with pytest.raises(GrammarError, match=", at #"):
        trial.run("json_schema", json.dumps(schema), RELAXED)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_known_format_is_held(trial: GrammarTrial, name: str) -> None:
    assert not fits(trial, {"type": "string", "format": name}, '"<a b>"', FormOptions())


@pytest.mark.parametrize("beside", [{}, {"pattern": "^[0-9T:Z-]*$"}, {"minLength": 4}])
@pytest.mark.parametrize(("name", "rest"), [("date", ""), ("date-time", "T10:20:30Z")])
def test_a_date_is_a_day_that_there_is(trial: GrammarTrial, name: str, rest: str, beside: dict[str, Any]) -> None:
    schema = {"type": "string", "format": name, **beside}
    days = ["2024-02-29", "2000-02-29", "2023-12-31", "2023-02-28"], ["2023-02-29", "1900-02-29", "2023-04-31"]
    for expected, texts in zip((True, False), days, strict=True):
        for text in texts:
            assert fits(trial, schema, f'"{text}{rest}"', FormOptions()) is expected, text


@pytest.mark.parametrize(
    ("text", "is_compact", "is_fine"),
    [
        ('{"x":["a",1]}', True, True),
        ('{"x": ["a",1]}', True, False),
        ('{"x":["a", 1]}', True, False),
        ('{ "x":[]}', True, False),
        ('{"x":[],"a b":" , "}', True, True),
        ('{"x":["a",1]}', False, True),
        ('{"x":' + " " * 16 + "[]}", False, True),
        ('{"x":' + "\n" * 17 + "[]}", False, False),
    ],
)
def test_json_may_be_without_blanks(trial: GrammarTrial, text: str, is_compact: bool, is_fine: bool) -> None:
    options = FormOptions(is_compact=is_compact)
    assert fits(trial, {"type": "object", "properties": {"x": {"type": "array"}}, OPEN: True}, text, options) == is_fine


def test_any_object_may_be_without_blanks(trial: GrammarTrial) -> None:
    source = trial.run("json_object", "", FormOptions(is_compact=True)).text
    matcher = trial._library.compile(source)
    assert matcher.try_consume_tokens(trial._library.tokenizer.tokenize_str("{ ")) < 2
