"""Replies as Hermes and Qwen models write them: from their documentation, and from reports of parsers that failed."""

from __future__ import annotations

import pytest

from services.tokenizer.replies import ReasoningPart, ReplyPart, TextPart
from tests.support.tokenizer.replies import call_part, parse_every_way

TEMPERATURE = '{"location": "San Francisco, CA, USA"}'
TOMORROW = '{"location": "San Francisco, CA, USA", "date": "2024-10-01"}'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("The current temperature is 26.1°C.", [TextPart("The current temperature is 26.1°C.")]),
        # Qwen's documentation, "Function Calling".
        (
            f'<tool_call>\n{{"name": "get_weather", "arguments": {TEMPERATURE}}}\n</tool_call>\n'
            f'<tool_call>\n{{"name": "search", "arguments": {TOMORROW}}}\n</tool_call>',
            [call_part("get_weather", TEMPERATURE), call_part("search", TOMORROW, 1)],
        ),
        # Qwen3 with thinking.
        (
            "<think>\nOkay, the user asks for the weather.\n\nI should call get_weather.\n</think>\n\n"
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n</tool_call>',
            [
                ReasoningPart("Okay, the user asks for the weather.\n\nI should call get_weather."),
                call_part("get_weather", '{"city": "Paris", "unit": "celsius"}'),
            ],
        ),
        # Qwen3 with thinking disabled.
        ("<think>\n\n</think>\n\nHello! How can I help?", [TextPart("Hello! How can I help?")]),
        # Hermes 2 Pro: in one line, after some text.
        (
            'Sure, let me check.\n<tool_call>{"name": "get_weather", "arguments": {"city": "NYC"}}</tool_call>',
            [TextPart("Sure, let me check."), call_part("get_weather", '{"city": "NYC"}')],
        ),
        # Without the end, as when the model stops right after the object.
        (
            '<tool_call>\n{"name": "get_time", "arguments": {"trigger": true}}',
            [call_part("get_time", '{"trigger": true}')],
        ),
        (
            '<tool_call>\n{"name": "get_time", "arguments": {"trigger": true}',
            [call_part("get_time", '{"trigger": true}')],
        ),
        ('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool', [call_part("get_time", "{}")]),
        # Cut off by max_tokens: the part of the arguments that has arrived.
        (
            '<tool_call>\n{"name": "search", "arguments": {"query": "caf\\u00',
            [call_part("search", '{"query": "caf\\u00')],
        ),
        ('<tool_call>\n{"name": "search", "arguments": {"limit": 12', [call_part("search", '{"limit": 12')]),
        # Arguments first, no arguments, null, and as text.
        (
            '<tool_call>{"arguments": {"query": "x"}, "name": "search"}</tool_call>',
            [call_part("search", '{"query": "x"}')],
        ),
        ('<tool_call>{"name": "get_time"}</tool_call>', [call_part("get_time", "{}")]),
        (
            '<tool_call>\n{"name": "search", "arguments": "{\\"param\\": \\"max_connections\\"}"}\n</tool_call>',
            [call_part("search", '{"param": "max_connections"}')],
        ),
        # Two calls between one pair of markers.
        (
            '<tool_call>\n{"name": "search", "arguments": {"query": "cats"}}\n'
            '{"name": "get_time", "arguments": {}}\n</tool_call>',
            [call_part("search", '{"query": "cats"}'), call_part("get_time", "{}", 1)],
        ),
        # Markup within a string is part of the string.
        (
            '<tool_call>\n{"name": "search", "arguments": {"query": "</tool_call> \\"}\\\\"}}\n</tool_call> done',
            [call_part("search", '{"query": "</tool_call> \\"}\\\\"}'), TextPart(" done")],
        ),
        # Text after a call.
        (
            '<tool_call>{"name": "search", "arguments": {"query": "1"}}</tool_call>\nThat will do.',
            [call_part("search", '{"query": "1"}'), TextPart("That will do.")],
        ),
    ],
)
def test_recorded_replies(text: str, parts: list[ReplyPart]) -> None:
    assert parse_every_way("hermes", text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{not json}\n</tool_call>",
        '<tool_call>\n{"name": "get_time", "arguments": "hello"}\n</tool_call>',
        '<tool_call>\n{"name": "get_time", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "a\\nb", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "' + "x" * 300 + '"}\n</tool_call>',
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nAix\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>",
        '<tool_call>\n{"name": "get_we',
        "a </tool_call> b </think> c <think>",
        "\n\n  <thinking> <tool_calls>",
    ],
)
def test_text_that_is_not_a_call_is_returned_as_text(text: str) -> None:
    assert parse_every_way("hermes", text) == [TextPart(text)]


def test_a_call_after_a_broken_one_is_found() -> None:
    text = '<tool_call>{oops</tool_call>\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    assert parse_every_way("hermes", text) == [TextPart("<tool_call>{oops</tool_call>"), call_part("get_time", "{}")]


def test_text_that_breaks_a_call_already_sent_is_returned_as_text() -> None:
    text = '<tool_call>{"name": "search", "arguments": {"query": "a" oops}}</tool_call>'
    assert parse_every_way("hermes", text) == [call_part("search", '{"query": "a" '), TextPart("oops}}</tool_call>")]


def test_without_tools_calls_are_text_and_reasoning_is_not() -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    assert parse_every_way("hermes", f"<think>\nHm.\n</think>\n\n{call}", tools=()) == [
        ReasoningPart("Hm."),
        TextPart(call),
    ]


def test_the_template_may_have_opened_the_reasoning() -> None:
    prompt = "<|im_start|>assistant\n<think>\n"
    parts = [ReasoningPart("Hm."), TextPart("Yes.")]
    assert parse_every_way("hermes", "Hm.\n</think>\n\nYes.", prompt_text=prompt) == parts
    assert parse_every_way("hermes", "<think>\nHm.\n</think>\n\nYes.", prompt_text=prompt) == parts


def test_a_prompt_that_mentions_reasoning_does_not_open_it() -> None:
    prompt = "<|im_start|>user\nWhat does <think> mean?<|im_end|>\n<|im_start|>assistant\n"
    assert parse_every_way("hermes", "It opens it.", prompt_text=prompt) == [TextPart("It opens it.")]


def test_reasoning_is_recognised_only_at_the_beginning() -> None:
    text = "The tag <think>a</think> is text here."
    assert parse_every_way("hermes", text) == [TextPart(text)]
