"""Any value that a schema allows, spelled as models nearly write JSON, is read as that value; what is text stays it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.chat.conversation import Tool
from services.tokenizer.replies import ToolCallPart
from tests.support.tokenizer.call_spellings import FAMILIES, TEXTS, Family
from tests.support.tokenizer.replies import parse

CALLING = [name for name, family in FAMILIES.items() if family is not None]
NAMES = st.sampled_from(("city", "unit", "a", "b c", "größe", "type", "name"))
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>\x00\r"), max_size=12)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(-1e300, 1e300)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
# A schema, and values for it.
TYPED: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ({"type": "integer"}, st.integers(-(10**20), 10**20)),
    ({"type": "number"}, NUMBERS),
    ({"type": "boolean"}, st.booleans()),
    ({"type": ["boolean", "null"]}, st.none() | st.booleans()),
    ({"anyOf": [{"type": "array"}, {"type": "null"}]}, st.lists(VALUES, max_size=3)),
    ({"type": "object"}, st.dictionaries(WORDS, VALUES, max_size=3)),
    ({"$ref": "#/$defs/numbers"}, st.lists(NUMBERS, max_size=3)),
    ({"enum": [1, None, False, [2]]}, st.sampled_from([1, None, False, [2]])),
]
ROOT: dict[str, Any] = {"type": "object", "$defs": {"numbers": {"type": "array", "items": {"type": "number"}}}}


@st.composite
def arguments(draw: st.DrawFn) -> tuple[Tool, dict[str, Any]]:
    """A tool, and arguments for it."""
    properties: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=4)):
        schema, drawn = ({"type": "string"}, WORDS) if name in TEXTS else draw(st.sampled_from(TYPED))
        properties[name] = schema
        if draw(st.booleans()):
            values[name] = draw(drawn)
    return Tool("look", "", {**ROOT, "properties": properties}), values


class Speller:
    """Writes values as a model may."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], *, has_quotes: bool) -> None:
        """With `has_quotes`, strings may be between single ones."""
        self._draw = draw
        self._quotes = "\"'" if has_quotes else '"'

    def _one_of(self, *choices: str) -> str:
        return str(self._draw(st.sampled_from(choices)))

    def spelled(self, value: Any) -> str:
        """One of the ways to write a value."""
        if value is None or isinstance(value, bool):
            return self._one_of(json.dumps(value), str(value))
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, list):
            return self._members("[]", [self.spelled(each) for each in value])
        if isinstance(value, dict):
            pairs = [f"{self._string(key)}:{self._blank()}{self.spelled(each)}" for key, each in value.items()]
            return self._members("{}", pairs)
        return json.dumps(value)

    def _string(self, text: str) -> str:
        quote = self._one_of(*self._quotes)
        inner = json.dumps(text, ensure_ascii=self._draw(st.booleans()))[1:-1]
        return f'"{inner}"' if quote == '"' else "'" + inner.replace('\\"', '"').replace("'", "\\'") + "'"

    def _members(self, brackets: str, members: list[str]) -> str:
        comma = self._one_of("", ",") if members else ""
        inner = f",{self._blank()}".join(members) + self._blank() + comma + self._blank()
        return brackets[0] + inner + brackets[1]

    def _blank(self) -> str:
        return self._one_of("", " ", "\n", "  ")


def written(family: Family, speller: Speller, values: dict[str, Any]) -> str:
    """A call of `look`."""
    if family.pairs is None or not values or speller._one_of("pairs", "object") == "object":
        return family.call("look", speller.spelled(values))
    spelled = {key: value if key in TEXTS else speller.spelled(value) for key, value in values.items()}
    text = family.pairs("look", spelled)
    for tag in family.omitted:
        # Without both of GLM's tags between a key and its value, there is nothing to tell them apart.
        is_needed = tag == "<arg_value>" and "</arg_key>" not in text
        if not is_needed and speller._one_of("kept", "omitted") == "omitted":
            text = text.replace(tag, "")
    return text


def check(name: str, tool: Tool, values: dict[str, Any], data: st.DataObject) -> None:
    """Write a call, cut it anywhere, and read it."""
    family = FAMILIES[name]
    assert family is not None
    text = written(family, Speller(data.draw, has_quotes=True), values)
    parts = parse(name, [text], tools=[tool])
    assert all(isinstance(part, ToolCallPart) for part in parts), (text, parts)
    (call,) = (part for part in parts if isinstance(part, ToolCallPart))
    assert json.loads(call.arguments) == values, text
    size = data.draw(st.integers(1, 9))
    assert parse(name, [text[start : start + size] for start in range(0, len(text), size)], tools=[tool]) == parts


@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=20, deadline=None)
@given(tool_and_values=arguments(), data=st.data())
def test_near_json_is_the_value(name: str, tool_and_values: tuple[Tool, dict[str, Any]], data: st.DataObject) -> None:
    check(name, *tool_and_values, data)


@pytest.mark.proof
@pytest.mark.parametrize("name", CALLING)
@settings(max_examples=3000, deadline=None)
@given(tool_and_values=arguments(), data=st.data())
def test_much_more_near_json(name: str, tool_and_values: tuple[Tool, dict[str, Any]], data: st.DataObject) -> None:
    check(name, *tool_and_values, data)


TAGGED = [name for name in CALLING if (family := FAMILIES[name]) is not None and family.pairs is not None]


def check_text(name: str, values: dict[str, str], data: st.DataObject) -> None:
    """Write a call whose values are text that quotes tags; each value is closed."""
    family = FAMILIES[name]
    assert family is not None
    assert family.pairs is not None
    tool = Tool("look", "", {"type": "object", "properties": {key: {"type": "string"} for key in TEXTS}})
    text = family.pairs("look", values)
    parts = parse(name, [text], tools=[tool])
    (call,) = (part for part in parts if isinstance(part, ToolCallPart))
    assert json.loads(call.arguments) == values, text
    size = data.draw(st.integers(1, 9))
    assert parse(name, [text[start : start + size] for start in range(0, len(text), size)], tools=[tool]) == parts


def quoting(name: str) -> st.SearchStrategy[str]:
    """Texts that quote a family's tags, but not the one that closes a value, nor the end of one call before another."""
    family = FAMILIES[name]
    assert family is not None
    end = family.call("f", "\0").partition("\0")[2].strip()
    tags = [family.quote, end, family.argument.format("none"), "Aix", "\nx", " <", "{'a': 1}"]
    return st.lists(st.sampled_from(tags), min_size=1, max_size=5).map("\nx\n".join).map(lambda text: f"x{text}\nx")


def check_quoted_tags(name: str, data: st.DataObject) -> None:
    """Read texts that quote tags as they were written."""
    values = st.dictionaries(st.sampled_from(TEXTS), quoting(name), min_size=1)
    check_text(name, data.draw(values), data)


@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_quoted_tag_is_text(name: str, data: st.DataObject) -> None:
    check_quoted_tags(name, data)


@pytest.mark.proof
@pytest.mark.parametrize("name", TAGGED)
@settings(max_examples=3000, deadline=None)
@given(data=st.data())
def test_many_more_quoted_tags(name: str, data: st.DataObject) -> None:
    check_quoted_tags(name, data)
