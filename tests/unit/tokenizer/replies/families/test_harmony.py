"""Replies as gpt-oss writes them: from OpenAI's documentation, and from reports of parsers that failed."""

from __future__ import annotations

import re

import pytest

from services.tokenizer.replies import ReasoningPart, ReplyPart, TextPart
from services.tokenizer.replies.families.harmony import HarmonyParser
from tests.support.tokenizer.replies import call_part, parse, parse_every_way

SPECIAL = HarmonyParser.markup | {"<|endoftext|>"}
ANALYSIS = "<|channel|>analysis<|message|>Need to use function get_weather.<|end|>"
ARGUMENTS = '{"location":"San Francisco"}'
REASONING = ReasoningPart("Need to use function get_weather.")
CALL_PART = call_part("get_weather", ARGUMENTS)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "<|channel|>analysis<|message|>User asks 2 + 2.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
            [ReasoningPart("User asks 2 + 2."), TextPart("2 + 2 = 4.")],
        ),
        ("<|channel|>final<|message|>The sky is blue.", [TextPart("The sky is blue.")]),
        *(
            (f"{ANALYSIS}<|start|>assistant{header}<|message|>{ARGUMENTS}{end}", [REASONING, CALL_PART])
            for header, end in [
                ("<|channel|>commentary to=functions.get_weather <|constrain|>json", "<|call|>"),
                # The end is a token that stops the completion.
                ("<|channel|>commentary to=functions.get_weather <|constrain|>json", ""),
                ("<|channel|>commentary to=functions.get_weather<|constrain|>json", "<|end|>"),
                ("<|channel|>commentary to=functions.get_weather json", ""),
                ("<|channel|>commentary to=functions.get_weather", "\n"),
                ("<|channel|>commentary to=functions.get_weather<|constrain|>json\n", ""),
                ("<|channel|>analysis to=functions.get_weather code", ""),
                (" to=functions.get_weather<|channel|>commentary <|constrain|>json", "<|call|>"),
                (" to=functions.get_weather<|channel|>analysis", ""),
                # Other orders.
                ("<|channel|>commentary <|constrain|>json to=functions.get_weather", "<|call|>"),
                ("<|channel|>commentary json to=functions.get_weather", ""),
                (" to=functions.get_weather<|constrain|>json<|channel|>commentary", ""),
                (" to=functions.get_weather", ""),
                # The recipient lacks its namespace.
                ("<|channel|>commentary to=get_weather <|constrain|>json", ""),
            ]
        ),
        # The prompt ends with the start of the message.
        (f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", [CALL_PART]),
        # A preamble before the call is meant for the user.
        (
            f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>I'll look it up.<|end|>"
            f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}",
            [REASONING, TextPart("I'll look it up."), CALL_PART],
        ),
        *(
            (f"<|channel|>commentary to=functions.get_time<|message|>{end}", [call_part("get_time", "{}")])
            for end in ("<|call|>", "", " \n<|end|>")
        ),
        # Several calls, and messages without their start.
        (
            f"<|channel|>commentary to=functions.get_weather<|message|>{ARGUMENTS}<|call|>"
            "<|channel|>analysis<|message|>And the time.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.get_time<|message|>{}<|call|>",
            [CALL_PART, ReasoningPart("And the time."), call_part("get_time", "{}", 1)],
        ),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [ReasoningPart("a"), TextPart("b")]),
        # Cut off.
        (
            '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"location":"San',
            [call_part("get_weather", '{"location":"San')],
        ),
        ("<|channel|>analysis<|message|>We need", [ReasoningPart("We need")]),
        # Built-in tools are not functions; they are called during reasoning.
        (
            '<|channel|>analysis to=browser.search code<|message|>{"query":"x"}<|call|>',
            [ReasoningPart('{"query":"x"}')],
        ),
    ],
)
def test_recorded_replies(text: str, parts: list[ReplyPart]) -> None:
    assert parse_every_way("harmony", text, special_tokens=SPECIAL) == parts
    assert parse_every_way("harmony", text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "I am no message. to=functions.get_weather",
        "<|channel|>analysis",
        "<|channel|>commentary to=functions.get_weather<|message|>not json<|call|>",
        "<|channel|>commentary to=python<|message|>print(1)<|call|>",
        "<|channel|>" + "x" * 600 + "<|message|>a",
        " to=functions.get_weather and more",
        "<|start|>user<|message|>Hi",
    ],
)
def test_text_outside_any_channel_and_call_is_returned_without_special_tokens(text: str) -> None:
    assert parse_every_way("harmony", text, special_tokens=SPECIAL) == [TextPart(re.sub(r"<\|\w+\|>", "", text))]


def test_a_call_that_was_cut_off_before_its_arguments_is_text() -> None:
    text = "<|channel|>commentary to=functions.get_time<|message|>"
    assert parse("harmony", list(text), is_cut=True) == [TextPart(text)]


def test_without_tools_a_call_is_text_and_reasoning_is_not() -> None:
    call = f"<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{ARGUMENTS}<|call|>"
    assert parse_every_way("harmony", ANALYSIS + call, tools=()) == [REASONING, TextPart(call)]


def test_other_special_tokens_are_dropped() -> None:
    text = "<|channel|>final<|message|>Hi<|endoftext|>"
    assert parse_every_way("harmony", text, special_tokens=SPECIAL) == [TextPart("Hi")]
    assert parse_every_way("harmony", text) == [TextPart("Hi<|endoftext|>")]
