"""Replies as GLM-4.5 and later write them: from their templates, and from reports of parsers that failed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.tokenizer.replies import ReasoningPart, ReplyPart, ReplySetting, TextPart, ToolCallPart, make_reply_parser
from services.tokenizer.replies.calls.argument_forms import ArgumentForms
from tests.support.tokenizer.replies import TOOLS, call_part, parse_every_way, tool


def call(name: str, between: str = "\n", **arguments: str) -> str:
    pairs = (
        f"{between}<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>" for key, value in arguments.items()
    )
    return f"<tool_call>{name}{''.join(pairs)}{between}</tool_call>"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("This is a test.", [TextPart("This is a test.")]),
        (
            call("get_weather", city="Beijing", unit="2025"),
            [call_part("get_weather", '{"city": "Beijing", "unit": "2025"}')],
        ),
        # GLM-4.7 writes no line breaks; other replies have spaces too.
        (
            call("get_weather", "", city="Beijing", days="3"),
            [call_part("get_weather", '{"city": "Beijing", "days": 3}')],
        ),
        (call("get_weather", "\n    ", city="Dallas"), [call_part("get_weather", '{"city": "Dallas"}')]),
        (
            "<think>I want to get the weather.</think>\n\nI will help you.\n" + call("get_weather", city="北京"),
            [
                ReasoningPart("I want to get the weather."),
                TextPart("I will help you."),
                call_part("get_weather", '{"city": "北京"}'),
            ],
        ),
        (
            call("search", query="a") + "\n" + call("search", query="b"),
            [call_part("search", '{"query": "a"}'), call_part("search", '{"query": "b"}', 1)],
        ),
        ("<tool_call>get_time\n</tool_call>", [call_part("get_time", "{}")]),
        ("<tool_call>get_time</tool_call>", [call_part("get_time", "{}")]),
        # A string argument stays text whatever it looks like; any other is parsed as JSON if possible.
        (
            call("get_weather", city=' "x" \\ {\n</arg>', days="[1, 2]", hourly="true", at="12:30"),
            [
                call_part(
                    "get_weather", '{"city": " \\"x\\" \\\\ {\\n</arg>", "days": [1, 2], "hourly": true, "at": "12:30"}'
                )
            ],
        ),
        # A tool that was not offered has no schema.
    ],
)
def test_recorded_replies(text: str, parts: list[ReplyPart]) -> None:
    assert parse_every_way("glm4", text) == parts


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>caf", '{"query": "caf'),
        ("<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>café</arg_value>\n", '{"query": "café"'),
        ("<tool_call>search\n<arg_key>limit</arg_key>\n<arg_value>12", '{"limit": 12'),
    ],
)
def test_a_call_that_is_cut_off_has_the_arguments_that_have_arrived(text: str, arguments: str) -> None:
    assert parse_every_way("glm4", text, is_cut=True) == [call_part("search", arguments)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        call("made_up", a="1", b="x"),
        f"<tool_call>{'x' * 300}</tool_call>",
        "<tool_call>a\nb</tool_call>",
        "a <arg_key>b</arg_key> </tool_call>",
    ],
)
def test_text_that_is_not_a_call_is_returned_as_text(text: str) -> None:
    assert parse_every_way("glm4", text) == [TextPart(text)]


def test_text_that_breaks_a_call_already_sent_is_returned_as_text() -> None:
    rest = "\nand\n<arg_key>unit</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"
    text = f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Seattle</arg_value>{rest}"
    assert parse_every_way("glm4", text) == [call_part("get_weather", '{"city": "Seattle"'), TextPart(rest)]


def test_text_arguments_are_sent_as_they_arrive() -> None:
    parser = make_reply_parser("glm4", ReplySetting(TOOLS))
    parser.feed("<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>")
    streamed = [part for piece in ("caf", 'é "', "x</arg") for part in parser.feed(piece)]
    assert [part.arguments for part in streamed if isinstance(part, ToolCallPart)] == ["caf", 'é \\"', "x"]


@pytest.mark.parametrize(
    ("schema", "is_text"),
    [
        ({"type": "string"}, True),
        ({"type": "string", "enum": ["a"]}, True),
        ({"enum": ["a", "b"]}, True),
        ({"const": "a"}, True),
        ({"enum": ["a", 1]}, False),
        ({"type": "integer"}, False),
        ({}, False),
        (None, False),
        (True, False),
    ],
)
def test_an_argument_is_text_if_its_schema_allows_nothing_else(schema: Any, is_text: bool) -> None:
    assert ArgumentForms(tool("t", a=schema).parameters).is_text("a") == is_text
    text = call("t", a="1")
    (part,) = parse_every_way("glm4", text, tools=(tool("t", a=schema),))
    assert isinstance(part, ToolCallPart)
    assert json.loads(part.arguments) == {"a": "1" if is_text else 1}


def test_without_tools_a_call_is_text() -> None:
    text = call("search", query="a")
    assert parse_every_way("glm4", text, tools=()) == [TextPart(text)]
