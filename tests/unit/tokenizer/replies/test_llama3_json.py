"""Replies as Llama 3 models write them: from Meta's documentation, and from reports of parsers that failed."""

from __future__ import annotations

import pytest

from services.tokenizer.replies import ReplyPart
from tests.support.replies import called, parse_every_way, said

GET_TIME = '{"name": "get_time", "parameters": {}}'
SPECIAL = frozenset({"<|python_tag|>", "<|eom_id|>", "<|eot_id|>"})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("The weather is fine.", [said("The weather is fine.")]),
        (
            '{"name": "search", "parameters": {"query": "test", "limit": 10}}',
            [called("search", '{"query": "test", "limit": 10}')],
        ),
        # Llama 3.1 also writes the type.
        (
            '{"type": "function", "name": "get_weather", "parameters": {"city": "San Francisco"}}',
            [called("get_weather", '{"city": "San Francisco"}')],
        ),
        ('{"name": "search", "arguments": {"query": "test"}}', [called("search", '{"query": "test"}')]),
        ('{"parameters": {"query": "x"}, "name": "search"}', [called("search", '{"query": "x"}')]),
        (
            '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
            [called("get_weather", '{"city": "Paris"}')],
        ),
        # After the tag, any name is accepted.
        ('<|python_tag|>{"name":"made_up","parameters":{}}', [called("made_up", "{}")]),
        *(
            (
                separator.join(['{"name": "search", "parameters": {"query": "1"}}', GET_TIME]),
                [called("search", '{"query": "1"}'), called("get_time", "{}", 1)],
            )
            for separator in ("; ", ";", ";\n", "\n", " ; ", "")
        ),
        (
            'Here is the result: {"name": "get_time", "parameters": {}} Would you like to know more?',
            [said("Here is the result: "), called("get_time", "{}"), said(" Would you like to know more?")],
        ),
        (
            '{"name": "search", "parameters": {"query": "test"}} The arguments I passed were {"query": "test"}',
            [called("search", '{"query": "test"}'), said(' The arguments I passed were {"query": "test"}')],
        ),
        (
            '{"name": "search", "parameters": {"query": "He said \\"{x}\\" [y]", "in": {"a": {"b": []}}}}',
            [called("search", '{"query": "He said \\"{x}\\" [y]", "in": {"a": {"b": []}}}')],
        ),
        # Cut off.
        ('{"name": "search", "parameters": {"query": "x', [called("search", '{"query": "x')]),
    ],
)
def test_recorded_replies(text: str, parts: list[ReplyPart]) -> None:
    assert parse_every_way("llama3_json", text) == parts


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "made_up", "parameters": {}}',
        '{"name": "get_time"}',
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
    assert parse_every_way("llama3_json", text) == [said(text)]


def test_json_is_held_back_only_while_it_may_be_a_call() -> None:
    text = '{"name": "Ada", "parameters": 1}'
    assert parse_every_way("llama3_json", text) == [said(text)]


def test_the_end_of_a_message_is_dropped_if_the_tag_is_a_special_token() -> None:
    text = '<|python_tag|>{"name": "get_time", "parameters": {}}<|eom_id|>'
    assert parse_every_way("llama3_json", text, special_tokens=SPECIAL) == [called("get_time", "{}")]


def test_without_tools_a_call_is_text() -> None:
    text = '{"name": "search", "parameters": {}}'
    assert parse_every_way("llama3_json", text, tools=()) == [said(text)]
