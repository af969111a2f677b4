"""Replies as DeepSeek-V3, R1 and V3.1 write them: from their templates, and from reports of parsers that failed."""

from __future__ import annotations

import pytest

from services.tokenizer.replies import ReasoningPart, ReplyPart, TextPart
from services.tokenizer.replies.families.deepseek_v3 import DeepseekV3Parser
from tests.support.tokenizer.replies import call_part, parse_every_way, tool

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, TWO = '{"x":1}', '{"y":2}'
TOKYO = '{"city": "Tokyo", "unit": "celsius"}'


def v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("How can I help you today?", [TextPart("How can I help you today?")]),
        (f"{CALLS}{v3('get_weather', TOKYO)}{END_CALLS}", [call_part("get_weather", TOKYO)]),
        (
            f"{CALLS}{v3('get_weather', TOKYO)}\n{v3('search', '{}')}{END_CALLS}",
            [call_part("get_weather", TOKYO), call_part("search", "{}", 1)],
        ),
        (
            f"Let me check the weather for you.{CALLS}{v3('get_weather', TOKYO)}{END_CALLS}",
            [TextPart("Let me check the weather for you."), call_part("get_weather", TOKYO)],
        ),
        # A line break before the end of the call and of the calls.
        (
            f"{CALLS}{v3('get_weather', TOKYO)}{END_CALLS}".replace("```<", "```\n<").replace(
                END_CALLS, "\n" + END_CALLS
            ),
            [call_part("get_weather", TOKYO)],
        ),
        # R1 omits the end of the calls; some replies begin without the start of the calls.
        (f"{CALLS}{v3('get_weather', TOKYO)}", [call_part("get_weather", TOKYO)]),
        (f"{v3('get_weather', TOKYO)} And more.", [call_part("get_weather", TOKYO), TextPart(" And more.")]),
        # V3.1.
        (
            f"some prefix text{CALLS}{v31('search', ONE)}{v31('get_time', TWO)}{END_CALLS} some suffix text",
            [
                TextPart("some prefix text"),
                call_part("search", ONE),
                call_part("get_time", TWO, 1),
                TextPart(" some suffix text"),
            ],
        ),
        # R1.
        (
            f"<think>\nThe user wants the weather.\n</think>\n\n{CALLS}{v3('get_weather', TOKYO)}{END_CALLS}",
            [ReasoningPart("The user wants the weather."), call_part("get_weather", TOKYO)],
        ),
    ],
)
def test_recorded_replies(text: str, parts: list[ReplyPart]) -> None:
    assert parse_every_way("deepseek_v3", text) == parts


def test_a_tool_may_have_the_name_of_the_only_type() -> None:
    text = f"{CALLS}{v31('function', '{}')}{v3('function', TOKYO)}{END_CALLS}"
    parts = parse_every_way("deepseek_v3", text, tools=(tool("function"),))
    assert parts == [call_part("function", "{}"), call_part("function", TOKYO, 1)]


@pytest.mark.parametrize(
    "text",
    [
        f"Let me look that up.{CALLS}get_weather",
        f'{CALLS}search<｜tool▁sep｜>{{"x":1}}{END_CALLS}',
        f"{CALLS}function<｜tool▁sep｜>get_weather\n```json\n{{}}\n```{END_CALLS}",
        f"{CALLS}<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```python\nx\n```<｜tool▁call▁end｜>",
        f"{CALLS}<｜tool▁call▁begin｜>{'x' * 300}<｜tool▁sep｜>{{}}",
        CALLS,
    ],
)
def test_text_that_is_not_a_call_is_returned_as_text(text: str) -> None:
    assert parse_every_way("deepseek_v3", text) == [TextPart(text)]


def test_text_that_breaks_a_call_already_sent_is_returned_as_text() -> None:
    broken = v3("get_weather", '{"city": "Tokyo"')
    text = f"{CALLS}{broken}{END_CALLS}"
    assert parse_every_way("deepseek_v3", text) == [
        call_part("get_weather", '{"city": "Tokyo"\n'),
        TextPart(f"```<｜tool▁call▁end｜>{END_CALLS}"),
    ]


def test_the_template_may_have_opened_or_closed_the_reasoning() -> None:
    parts = parse_every_way("deepseek_v3", "Hm.\n</think>\n\nYes.", prompt_text="<｜Assistant｜><think>\n")
    assert parts == [ReasoningPart("Hm."), TextPart("Yes.")]
    assert parse_every_way("deepseek_v3", "Yes.", prompt_text="<｜Assistant｜></think>") == [TextPart("Yes.")]


def test_special_tokens_are_dropped_when_the_markup_consists_of_them() -> None:
    special = DeepseekV3Parser.markup | {"<｜end▁of▁sentence｜>"}
    text = f"{CALLS}{v3('search', '{}')}{END_CALLS}<｜end▁of▁sentence｜>"
    assert parse_every_way("deepseek_v3", text, special_tokens=special) == [call_part("search", "{}")]
