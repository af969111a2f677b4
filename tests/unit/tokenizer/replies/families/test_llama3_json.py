"""Replies as Llama 3 models write them: from Meta's documentation, and from reports of parsers that failed."""

from __future__ import annotations

import pytest

from services.tokenizer.replies import ReplyPart, TextPart
from tests.support.tokenizer.replies import call_part, parse_every_way

GET_TIME = '{"name": "get_time", "parameters": {}}'
SPECIAL = frozenset({"<|python_tag|>", "<|eom_id|>", "<|eot_id|>"})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("The weather is fine.", [TextPart("The weather is fine.")]),
        (
            '{"name": "search", "parameters": {"query": "test", "limit": 10}}',
            [call_part("search", '{"query": "test", "limit": 10}')],
        ),
        # Llama 3.1 also writes the type.
        (
            '{"type": "function", "name": "get_weather", "parameters": {"city": "San Francisco"}}',
            [call_part("get_weather", '{"city": "San Francisco"}')],
        ),
        ('{"name": "search", "arguments": {"query": "test"}}', [call_part("search", '{"query": "test"}')]),
        ('{"parameters": {"query": "x"}, "name": "search"}', [call_part("search", '{"query": "x"}')]),
        (
            '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
            [call_part("get_weather", '{"city": "Paris"}')],
        ),
        *(
            (
                separator.join(['{"name": "search", "parameters": {"query": "1"}}', GET_TIME]),
                [call_part("search", '{"query": "1"}'), call_part("get_time", "{}", 1)],
            )
            for separator in ("; ", ";", ";\n", "\n", " ; ", "")
        ),
        (
            'Here is the result: {"name": "get_time", "parameters": {}} Would you like to know more?',
            [TextPart("Here is the result: "), call_part("get_time", "{}"), TextPart(" Would you like to know more?")],
        ),
        (
            '{"name": "search", "parameters": {"query": "test"}} The arguments I passed were {"query": "test"}',
            [call_part("search", '{"query": "test"}'), TextPart(' The arguments I passed were {"query": "test"}')],
        ),
        (
            '{"name": "search", "parameters": {"query": "He said \\"{x}\\" [y]", "in": {"a": {"b": []}}}}',
            [call_part("search", '{"query": "He said \\"{x}\\" [y]", "in": {"a": {"b": []}}}')],
        ),
        # Cut off.
        ('{"name": "search", "parameters": {"query": "x', [call_part("search", '{"query": "x')]),
    ],
)
def test_recorded_replies(text: str, parts: list[ReplyPart]) -> None:
    assert parse_every_way("llama3_json", text) == parts


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "made_up", "parameters": {}}',
        '<|python_tag|>{"name":"made_up","parameters":{}}',
        '{"parameters": {}}',
        '{"name": "search", "score": 3, "parameters": {}}',
        '{"title": "Aix", "name": "search"}',
        "[get_weather(city='San Francisco', metric='celsius')]",
        "def f() -> set[int]:\n    return {1, 2}",
        "<|python_tag|>print(1 + 1)",
        '<|python_tag|>brave_search.call(query="weather")',
        "{{{{",
    ],
)
def test_text_that_is_not_a_call_is_returned_as_text(text: str) -> None:
    assert parse_every_way("llama3_json", text) == [TextPart(text)]


def test_json_is_held_back_only_while_it_may_be_a_call() -> None:
    text = '{"name": "Ada", "parameters": 1}'
    assert parse_every_way("llama3_json", text) == [TextPart(text)]


def test_the_end_of_a_message_is_dropped_if_the_tag_is_a_special_token() -> None:
    text = '<|python_tag|>{"name": "get_time", "parameters": {}}<|eom_id|>'
    assert parse_every_way("llama3_json", text, special_tokens=SPECIAL) == [call_part("get_time", "{}")]


def test_without_tools_a_call_is_text() -> None:
    text = '{"name": "search", "parameters": {}}'
    assert parse_every_way("llama3_json", text, tools=()) == [TextPart(text)]
