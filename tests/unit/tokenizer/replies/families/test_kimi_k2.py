"""Replies as Kimi K2 writes them: from its documentation and template, and from reports of parsers that failed."""

from __future__ import annotations

from typing import Any

import pytest

from services.tokenizer.replies import ReasoningPart, ReplyPart, ReplySetting, TextPart, ToolCallPart, make_reply_parser
from services.tokenizer.replies.families.kimi_k2 import KimiK2Parser
from tests.support.tokenizer.replies import TOOLS, call_part, parse_every_way, tool

CALLS, END_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
TOKYO = '{"city": "Tokyo", "unit": "celsius"}'
# Markers inside a string are text.
MARKERS = '{"query": "<|tool_call_end|><|tool_calls_section_end|><|tool_call_begin|>functions.search:1"}'


def call(written: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


WEATHER = call("functions.get_weather:0", TOKYO)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("How can I help you today?", [TextPart("How can I help you today?")]),
        (f"{CALLS}{WEATHER}{END_CALLS}", [call_part("get_weather", TOKYO)]),
        (
            f"I look.{CALLS}{WEATHER}{call('functions.search:1', MARKERS)}{END_CALLS}",
            [TextPart("I look."), call_part("get_weather", TOKYO), call_part("search", MARKERS, 1)],
        ),
        # With blanks and line breaks between all elements.
        (
            f"{CALLS}\n<|tool_call_begin|> functions.get_weather:0 <|tool_call_argument_begin|> {TOKYO} "
            f"<|tool_call_end|>\n{END_CALLS}\nDone.",
            [call_part("get_weather", TOKYO), TextPart("Done.")],
        ),
        # In the singular.
        (
            f"Hm.\n<|tool_call_section_begin|>{WEATHER}<|tool_call_section_end|>",
            [TextPart("Hm."), call_part("get_weather", TOKYO)],
        ),
        # Without the markers around all calls, and without what ends the last one.
        (f"{WEATHER}", [call_part("get_weather", TOKYO)]),
        (
            f"{CALLS}<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{{}}",
            [call_part("get_time", "{}")],
        ),
        (
            f"<think>\nThe weather.\n</think>\n\n{CALLS}{WEATHER}{END_CALLS}",
            [ReasoningPart("The weather."), call_part("get_weather", TOKYO)],
        ),
    ],
)
def test_recorded_replies(text: str, parts: list[ReplyPart]) -> None:
    assert parse_every_way("kimi_k2", text) == parts


@pytest.mark.parametrize(
    "text",
    [
        CALLS,
        f"{CALLS}functions.get_weather:0{END_CALLS}",
        f"{CALLS}{call('functions.get_weather:0', 'Tokyo')}{END_CALLS}",
        f"{CALLS}{call('', TOKYO)}{END_CALLS}",
        f"{CALLS}{call('functions.:0', TOKYO)}{END_CALLS}",
        f"{CALLS}{call('x' * 300, '{}')}{END_CALLS}",
    ],
)
def test_text_that_is_not_a_call_is_returned_as_text(text: str) -> None:
    assert parse_every_way("kimi_k2", text) == [TextPart(text)]


def ids(*written: str, **setting: Any) -> list[tuple[str, str]]:
    """The names and ids of calls that the model wrote with these ids."""
    parser = make_reply_parser("kimi_k2", ReplySetting(**{"tools": TOOLS, **setting}))
    parts = [*parser.feed(CALLS + "".join(call(each, "{}") for each in written) + END_CALLS), *parser.finish()]
    return [(part.name, part.id) for part in parts if isinstance(part, ToolCallPart) and part.id]


def test_an_id_is_the_models_own() -> None:
    assert ids("functions.search:4", "functions.get_time:5") == [
        ("search", "functions.search:4"),
        ("get_time", "functions.get_time:5"),
    ]


def test_an_id_without_its_prefix_or_index_is_completed() -> None:
    assert ids("search:0", "search", "functions.get_time", earlier_ids=("functions.search:0", "", "x")) == [
        # The first was used before in the conversation, which had three calls.
        ("search", "functions.search:3"),
        ("search", "functions.search:4"),
        ("get_time", "functions.get_time:5"),
    ]


def test_ids_that_a_model_repeats_are_told_apart() -> None:
    assert ids("functions.search:0", "functions.search:0", "functions.search:1", "functions.search:0") == [
        ("search", "functions.search:0"),
        ("search", "functions.search:1"),
        ("search", "functions.search:2"),
        ("search", "functions.search:3"),
    ]


@pytest.mark.parametrize(
    ("written", "names", "expected"),
    [
        ("functions.math.add:0", ["math.add"], ("math.add", "functions.math.add:0")),
        ("math.add:0", ["math.add"], ("math.add", "functions.math.add:0")),
        ("functions.functions.x:0", ["functions.x"], ("functions.x", "functions.functions.x:0")),
        ("functions.x:0", ["functions.x"], ("functions.x", "functions.functions.x:0")),
        ("functions.a:1:0", ["a:1"], ("a:1", "functions.a:1:0")),
        ("functions.a:1", ["a:1"], ("a:1", "functions.a:1:0")),
        ("functions.a:1", ["a:1", "a"], ("a", "functions.a:1")),
        ("漢字:2", ["漢字"], ("漢字", "functions.漢字:2")),
    ],
)
def test_a_name_may_look_like_the_rest_of_an_id(written: str, names: list[str], expected: tuple[str, str]) -> None:
    assert ids(written, tools=tuple(map(tool, names))) == [expected]


def test_an_id_that_could_not_come_back_is_another_one() -> None:
    for name in ("漢" * 83, "x" * 256):
        ((called, call_id),) = ids(f"functions.{name}:0", tools=(tool(name),))
        assert called == name
        assert call_id.startswith("call_")


def test_the_template_may_have_opened_or_closed_the_reasoning() -> None:
    parts = parse_every_way("kimi_k2", "Hm.</think>Yes.", prompt_text="assistant<|im_middle|><think>")
    assert parts == [ReasoningPart("Hm."), TextPart("Yes.")]
    parts = parse_every_way("kimi_k2", "Yes.", prompt_text="assistant<|im_middle|><think></think>")
    assert parts == [TextPart("Yes.")]


def test_calls_in_reasoning_that_ends_the_reply_are_made_with_ids_of_their_own() -> None:
    reply = f"{CALLS}{WEATHER}{END_CALLS}<think>Again: {CALLS}{WEATHER}{call('get_time', '{}')}{END_CALLS}"
    parser = make_reply_parser("kimi_k2", ReplySetting(TOOLS))
    parts = [*parser.feed(reply), *parser.finish()]
    assert [part.id for part in parts if isinstance(part, ToolCallPart) and part.id] == [
        "functions.get_weather:0",
        "functions.get_weather:1",
        "functions.get_time:2",
    ]


def test_special_tokens_are_dropped_when_the_markup_consists_of_them() -> None:
    special = KimiK2Parser.markup | {"<|im_end|>"}
    text = f"{CALLS}{call('functions.search:0', MARKERS)}{END_CALLS}<|im_end|>"
    assert parse_every_way("kimi_k2", text, special_tokens=special) == [call_part("search", MARKERS)]
