"""Replies as Qwen3-Coder, Qwen3.5 and Nemotron write them: from their templates, and from reports of other parsers."""

from __future__ import annotations

import pytest

from services.tokenizer.replies import ReasoningPart, ReplyPart, TextPart
from tests.support.tokenizer.replies import call_part, parse_every_way


def function(name: str, **arguments: str) -> str:
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{pairs}</function>"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{function(name, **arguments)}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("This is a test.", [TextPart("This is a test.")]),
        (
            f"<think>\nHm.\n</think>\n\nSo:\n{call('get_weather', city='Beijing', days='3')}",
            [ReasoningPart("Hm."), TextPart("So:"), call_part("get_weather", '{"city": "Beijing", "days": 3}')],
        ),
        (
            call("search", query="a") + "\n" + call("search", query="b", limit="1.50"),
            [call_part("search", '{"query": "a"}'), call_part("search", '{"query": "b", "limit": 1.50}', 1)],
        ),
        (call("get_time"), [call_part("get_time", "{}")]),
        # Only the line breaks next to the markers are not the value's.
        (
            call("search", query="\n  if a <b>:\n\tc\n"),
            [call_part("search", '{"query": "\\n  if a <b>:\\n\\tc\\n"}')],
        ),
        (
            "<tool_call><function=search><parameter=query>2025</parameter></function></tool_call>",
            [call_part("search", '{"query": "2025"}')],
        ),
        # The markers around a function, or its end, are sometimes missing.
        (f"So:\n{function('get_time')}", [TextPart("So:"), call_part("get_time", "{}")]),
        (f"{function('get_time')}\n</tool_call>", [call_part("get_time", "{}")]),
        ("<tool_call>\n<function=get_time>\n</tool_call>", [call_part("get_time", "{}")]),
        # Not offered.
        (function("made_up"), [TextPart(function("made_up"))]),
        (call("made_up", a="[1]"), [TextPart(call("made_up", a="[1]"))]),
        # No call.
        ("Write <function=NAME> or\n<tool_call> x", [TextPart("Write <function=NAME> or\n<tool_call> x")]),
    ],
)
def test_a_reply_is_split_into_its_parts(text: str, parts: list[ReplyPart]) -> None:
    assert parse_every_way("qwen3_coder", text) == parts


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call>\n<function=search>\n<parameter=query>\nab", '{"query": "ab'),
        ("<tool_call>\n<function=search>\n<param", ""),
    ],
)
def test_a_call_that_is_cut_off_has_the_arguments_that_have_arrived(text: str, arguments: str) -> None:
    assert parse_every_way("qwen3_coder", text, is_cut=True) == [call_part("search", arguments)]
