"""Whatever a model writes into a call, its arguments are JSON, and the message is accepted when it comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import check_chat
from services.tokenizer.chat.conversation import Tool
from services.tokenizer.json.json_values import read_json_object
from services.tokenizer.json.schema_types import types_of
from services.tokenizer.replies import REPLY_PARSERS, ReasoningPart, TextPart, ToolCallPart
from tests.support.tokenizer.replies import parse
from tests.support.tokenizer.reply_texts import FIND, HOSTILE_STRINGS, HOSTILE_VALUES, LOOK, call_text

FAMILIES = tuple(sorted(name for name in REPLY_PARSERS if name != "none"))


def check_message(parts: list[Any]) -> list[dict[str, Any]]:
    """Send the parsed message back as history; returns the arguments of its calls."""
    message = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_ASSISTANT)
    for part in parts:
        if isinstance(part, TextPart):
            message.content += part.text
        elif isinstance(part, ReasoningPart):
            message.reasoning += part.text
        elif part.name:
            message.tool_calls.add(id="call", name=part.name, arguments=part.arguments)
    user = tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_USER, content="hi")
    check_chat(tokenizer_pb2.Chat(messages=[user, message, user]))
    return [read_json_object(call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60)
@given(
    string=st.lists(st.sampled_from(HOSTILE_STRINGS), min_size=1, max_size=3).map("".join),
    value=st.sampled_from(HOSTILE_VALUES),
    size=st.integers(1, 30),
)
def test_hostile_arguments_are_json_and_come_back(name: str, string: str, value: str, size: int) -> None:
    text = call_text(name, string, value)
    whole = parse(name, [text], tools=[LOOK])
    assert parse(name, [text[start : start + size] for start in range(0, len(text), size)], tools=[LOOK]) == whole
    (arguments,) = check_message(whole)
    assert isinstance(arguments["a"], str)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "look", "arguments": null}</tool_call>',
        '<tool_call>{"name": "look", "arguments": ""}</tool_call>',
        '<tool_call>{"arguments": "null", "name": "look"}</tool_call>',
        '<tool_call>{"name": "look"}</tool_call>',
    ],
)
def test_a_call_may_say_that_it_has_no_arguments(text: str) -> None:
    assert check_message(parse("hermes", [text], tools=[LOOK])) == [{}]


def test_numbers_keep_the_models_digits() -> None:
    text = call_text("glm4", "x", "1.10")
    (call,) = (part for part in parse("glm4", [text], tools=[LOOK]) if isinstance(part, ToolCallPart))
    assert '"n": 1.10' in call.arguments


NULLABLE: list[tuple[Any, str, Any]] = [
    ({"type": ["string", "null"]}, "2024", "2024"),
    ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "2024", "2024"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
    ({"$ref": "#/$defs/word"}, "2024", "2024"),
    ({"allOf": [{"$ref": "#/$defs/word"}, {"minLength": 1}]}, "[1]", "[1]"),
    ({"oneOf": [{"const": "7"}, {"type": "null"}]}, "7", "7"),
    ({"type": ["string", "integer"]}, "2024", 2024),
    ({"type": "integer"}, "7", 7),
    ({"type": "number"}, "7", 7),
    ({"type": "array"}, "[1, 2]", [1, 2]),
    ({}, "2024", 2024),
    ({}, "not json", "not json"),
    (True, "{}", {}),
]


@pytest.mark.parametrize(("schema", "written", "value"), NULLABLE)
def test_an_untyped_value_follows_its_schema(schema: Any, written: str, value: Any) -> None:
    definitions: Any = {"word": {"type": "string"}}
    tool = Tool("look", "", {"type": "object", "properties": {"a": schema}, "$defs": definitions})
    text = f"<tool_call>look\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    assert check_message(parse("glm4", list(text), tools=[tool])) == [{"a": value}]


def test_a_schema_that_refers_to_itself_says_nothing() -> None:
    root: dict[str, Any] = {"$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    assert types_of({"$ref": "#/$defs/loop"}, root) is None
    # Each part is visited once, or this would take longer than the test may.
    many: Any = {"$defs": {"loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * 100}}}
    assert types_of({"$ref": "#/$defs/loop"}, many) is None
    assert types_of({"type": "string", "$ref": "https://example.com"}, root) == frozenset({"string"})
    assert json.dumps(sorted(types_of({"enum": [1, "a", None, [], 1.5]}, root) or ())) == (
        '["array", "integer", "null", "number", "string"]'
    )


THINKING = [
    ("hermes", "<think>", "</think>"),
    ("generic", "<think>", "</think>"),
    ("deepseek_v3", "<think>", "</think>"),
    ("deepseek_v32", "<think>", "</think>"),
    ("glm4", "<think>", "</think>"),
    ("kimi_k2", "<think>", "</think>"),
    ("qwen3_coder", "<think>", "</think>"),
    ("mistral", "[THINK]", "[/THINK]"),
    ("harmony", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
]


@pytest.mark.parametrize(("name", "begin", "end"), THINKING)
def test_a_reply_that_the_model_ended_in_reasoning_makes_the_whole_call_at_its_end(
    name: str, begin: str, end: str
) -> None:
    call = call_text(name, "x", "1")
    reply = f"{begin}I could write {call[:12]} and so on. Now:\n{call}"
    if name == "harmony":
        # There, a channel ends the reasoning.
        reply = f"{begin}Now I call.{end}{call}"
    parts = parse(name, [reply], tools=[LOOK])
    assert parse(name, list(reply), tools=[LOOK]) == parts
    assert check_message(parts)[0]["a"] == "x"
    if name != "harmony":
        assert not check_message(parse(name, [reply], tools=[LOOK], is_cut=True))
        assert not check_message(parse(name, [reply + " No."], tools=[LOOK]))
        assert not check_message(parse(name, [reply[: reply.rindex("1")]], tools=[LOOK]))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("between", ["", "\n", "text"])
def test_the_only_call_ends_the_reply(name: str, between: str) -> None:
    call = call_text(name, "x", "1")
    for reply in (call + between + call, call + between + "<|start|>assistant<|channel|>final<|message|>Hi"):
        parts = parse(name, [reply], tools=[LOOK], one_call=True)
        assert parse(name, list(reply), tools=[LOOK], one_call=True) == parts
        assert parts == parse(name, [call], tools=[LOOK])
    after_text = f"{'<|channel|>final<|message|>' if name == 'harmony' else ''}Hi"
    assert parse(name, [after_text], tools=[LOOK], one_call=True) == [TextPart("Hi")]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_beginning_of_a_call_beside_a_form_is_not_the_forms(name: str) -> None:
    call = call_text(name, "x", "1")
    for end in range(1, len(call)):
        parts = parse(name, [call[:end]], tools=[LOOK], has_form=True, is_cut=True)
        assert parse(name, list(call[:end]), tools=[LOOK], has_form=True, is_cut=True) == parts
        # Up to there it may still be the form.
        opening = REPLY_PARSERS[name].call_openings.max_length if name != "harmony" else len(call.partition("to=")[0])
        if end > opening:
            assert not any(isinstance(part, TextPart) for part in parts), call[:end]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_of_a_tool_that_is_not_allowed_is_text(name: str) -> None:
    call = call_text(name, "x", "1")
    reply = f"{call}\n{call.replace('look', 'find')}"
    parts = parse(name, [reply], tools=[LOOK, FIND], allowed_names=frozenset({"find"}))
    assert parse(name, list(reply), tools=[LOOK, FIND], allowed_names=frozenset({"find"})) == parts
    assert [part.name for part in parts if isinstance(part, ToolCallPart)] == ["find"]
    assert isinstance(parts[0], TextPart)
    every = parse(name, [reply], tools=[LOOK, FIND])
    assert [part.name for part in every if isinstance(part, ToolCallPart)] == ["look", "find"]


@pytest.mark.parametrize(("name", "begin", "end"), THINKING)
def test_reasoning_after_a_call_is_reasoning(name: str, begin: str, end: str) -> None:
    call = call_text(name, "x", "1")
    reply = f"{begin}One.{end}{call}\n{begin}Two.{end}{call}".replace("<|call|>\n", "<|call|>")
    parts = parse(name, [reply], tools=[LOOK])
    assert parse(name, list(reply), tools=[LOOK]) == parts
    assert "".join(part.text for part in parts if isinstance(part, ReasoningPart)) == "One.Two."
    assert len(check_message(parts)) == 2
    assert not "".join(part.text for part in parts if isinstance(part, TextPart)).strip()


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_special_tokens_of_a_familys_markup_never_reach_the_text(size: int) -> None:
    markup = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")
    for text in ("<|message|>a<|end|>b", "<|channel|>!<|message|>a", "x<|start|>y<|call|><|constrain|>", "<|channel|>"):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        parts = parse("harmony", pieces, tools=[LOOK], special_tokens=frozenset(markup))
        shown = "".join(part.text for part in parts if isinstance(part, TextPart))
        assert not any(token in shown for token in markup)
        kept = "".join(part.text for part in parse("harmony", pieces, tools=[LOOK]) if isinstance(part, TextPart))
        assert len(kept) >= len(shown)


def test_several_calls_at_the_end_of_reasoning_are_numbered_after_those_before() -> None:
    first, second = call_text("hermes", "x", "1"), call_text("hermes", "y", "2")
    nested = call_text("hermes", "a <tool_call> b", "3")
    reply = f"<think>One.</think>{first}<think>Two: <tool_call> is markup. {first}\n{second}\n{nested}"
    parts = parse("hermes", [reply], tools=[LOOK])
    assert [arguments["a"] for arguments in check_message(parts)] == ["x", "x", "y", "a <tool_call> b"]
    assert [part.index for part in parts if isinstance(part, ToolCallPart)] == [0, 1, 2, 3]
    in_reasoning = reply.replace(f"</think>{first}", "")
    for one_call, expected in ((False, ["x", "y", "a <tool_call> b"]), (True, ["x"])):
        parts = parse("hermes", [in_reasoning], tools=[LOOK], one_call=one_call)
        assert [arguments["a"] for arguments in check_message(parts)] == expected
