"""A conversation that all doors can express has one prompt over gRPC and the three APIs, or is refused by all alike."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_encoding import render_chat
from services.tokenizer.chat.chat_request import check_chat
from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.http.messages.request import read_messages_request
from services.tokenizer.http.requests.chat_request import read_chat_request
from services.tokenizer.http.responses.request import read_response_request
from services.tokenizer.text.control_tokens import ControlTokens
from shared.errors import InvalidRequestError
from tests.support.tokenizer.chat_templates import LocalRenderer
from tests.support.tokenizer.family_templates import TEMPLATES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
ROLES = tokenizer_pb2.Role
Turn = tuple[str, Any]
"""What a turn is, and its text, or for calls the text before them and how many they are."""


def load(name: str) -> ChatTemplate:
    renderer = LocalRenderer(SPECIAL)
    features = renderer.try_template(TEMPLATES[name])
    return ChatTemplate(TEMPLATES[name], renderer, features=features)


def calls_of(turn: int, count: int) -> list[tuple[str, str]]:
    return [(f"call_{turn}_{index}", json.dumps({"word": f"w{index}"})) for index in range(count)]


def over_grpc(systems: list[str], turns: list[Turn], *, has_tools: bool, thinks: bool | None) -> tokenizer_pb2.Chat:
    chat = tokenizer_pb2.Chat(keep_invalid_arguments=True)
    for text in systems:
        chat.messages.add(role=ROLES.ROLE_SYSTEM, content=text)
    for number, (kind, value) in enumerate(turns):
        if kind == "user":
            chat.messages.add(role=ROLES.ROLE_USER, content=value)
        elif kind == "assistant":
            chat.messages.add(role=ROLES.ROLE_ASSISTANT, content=value)
        else:
            message = chat.messages.add(role=ROLES.ROLE_ASSISTANT, content=value[0])
            for call_id, arguments in calls_of(number, value[1]):
                message.tool_calls.add(id=call_id, name="look_up", arguments=arguments)
            for call_id, _ in calls_of(number, value[1]):
                chat.messages.add(role=ROLES.ROLE_TOOL, tool_call_id=call_id, content="found")
    if has_tools:
        chat.tools.add(name="look_up", description="Look up.", parameters=json.dumps(SCHEMA))
    if thinks is not None:
        chat.template_variables = json.dumps({"enable_thinking": thinks, "thinking": thinks})
    return chat


def over_chat(systems: list[str], turns: list[Turn], *, has_tools: bool, thinks: bool | None) -> tokenizer_pb2.Chat:
    roles = itertools.cycle(("system", "developer"))
    messages: list[Any] = [{"role": next(roles), "content": text} for text in systems]
    for number, (kind, value) in enumerate(turns):
        if kind != "calls":
            messages.append({"role": kind, "content": value})
            continue
        calls = [
            {"id": call_id, "type": "function", "function": {"name": "look_up", "arguments": arguments}}
            for call_id, arguments in calls_of(number, value[1])
        ]
        messages.append({"role": "assistant", "content": value[0], "tool_calls": calls})
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "found"} for call in calls]
    function = {"name": "look_up", "description": "Look up.", "parameters": SCHEMA}
    body: dict[str, Any] = {"messages": messages, "enable_thinking": thinks}
    body["tools"] = [{"type": "function", "function": function}] if has_tools else None
    return read_chat_request(body, "r").message.chat


def over_messages(systems: list[str], turns: list[Turn], *, has_tools: bool, thinks: bool | None) -> tokenizer_pb2.Chat:
    messages: list[Any] = [{"role": "system", "content": text} for text in systems[1:]]
    for number, (kind, value) in enumerate(turns):
        if kind != "calls":
            messages.append({"role": kind, "content": value})
            continue
        calls = [
            {"type": "tool_use", "id": call_id, "name": "look_up", "input": json.loads(arguments)}
            for call_id, arguments in calls_of(number, value[1])
        ]
        text = [{"type": "text", "text": value[0]}] if value[0] else []
        messages.append({"role": "assistant", "content": [*text, *calls]})
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "found"} for call in calls]
        messages.append({"role": "user", "content": results})
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1, "system": systems[0] if systems else None}
    body["tools"] = [{"name": "look_up", "description": "Look up.", "input_schema": SCHEMA}] if has_tools else None
    body["thinking"] = None if thinks is None else {"type": "enabled" if thinks else "disabled"}
    return read_messages_request(body, "r").message.chat


def over_responses(
    systems: list[str], turns: list[Turn], *, has_tools: bool, thinks: bool | None
) -> tokenizer_pb2.Chat:
    items: list[Any] = [{"role": "developer", "content": text} for text in systems[1:]]
    for number, (kind, value) in enumerate(turns):
        if kind != "calls":
            items.append({"type": "message", "role": kind, "content": value})
            continue
        if value[0]:
            items.append({"type": "message", "role": "assistant", "content": value[0]})
        calls = calls_of(number, value[1])
        items += [
            {"type": "function_call", "call_id": call_id, "name": "look_up", "arguments": arguments}
            for call_id, arguments in calls
        ]
        items += [{"type": "function_call_output", "call_id": call_id, "output": "found"} for call_id, _ in calls]
    body: dict[str, Any] = {"input": items, "instructions": systems[0] if systems else None}
    tool = {"type": "function", "name": "look_up", "description": "Look up.", "parameters": SCHEMA}
    body["tools"] = [tool] if has_tools else None
    body["reasoning"] = None if thinks is None else {"enabled": thinks}
    return read_response_request(body, "r").message.chat


DOORS = (over_grpc, over_chat, over_messages, over_responses)


def prompt(template: ChatTemplate, chat: tokenizer_pb2.Chat) -> str:
    try:
        return render_chat(template, ControlTokens({}), check_chat(chat)).text
    except InvalidRequestError as error:
        return "refused: " + "; ".join(each.description for each in error.violations)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[str], list[Turn]]:
    systems = [f"Rule {index}." for index in range(draw(st.integers(0, 3)))]
    turns: list[Turn] = [("user", "Question 0?")]
    for number in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            turns.append(("calls", (draw(st.sampled_from(["", f"Before {number}."])), draw(st.integers(1, 2)))))
            if draw(st.booleans()):
                turns.append(("assistant", f"Answer {number}."))
        else:
            turns.append(("assistant", f"Answer {number}."))
        turns.append(("user", f"Question {number + 1}?"))
    return systems, turns


def check(template: ChatTemplate, conversation: tuple[list[str], list[Turn]], **options: Any) -> None:
    systems, turns = conversation
    prompts = [prompt(template, door(systems, turns, **options)) for door in DOORS]
    assert prompts == [prompts[0]] * len(DOORS)
    if prompts[0].startswith("refused: "):
        return
    said = [*systems, *(value for kind, value in turns if kind != "calls")]
    said += [value[0] for kind, value in turns if kind == "calls"]
    for text in said:
        assert text in prompts[0], "nothing is lost silently"


OPTIONS = st.fixed_dictionaries({"has_tools": st.booleans(), "thinks": st.sampled_from([None, True, False])})


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_door_has_the_same_prompt_or_the_same_reason(name: str) -> None:
    template = load(name)

    @settings(max_examples=12)
    @given(conversations(), OPTIONS)
    def run(conversation: tuple[list[str], list[Turn]], options: dict[str, Any]) -> None:
        check(template, conversation, **options)

    run()


@pytest.mark.proof
@pytest.mark.parametrize("name", TEMPLATES)
def test_many_conversations_have_the_same_prompt_by_every_door(name: str) -> None:
    template = load(name)

    @settings(max_examples=2000, deadline=None)
    @given(conversations(), OPTIONS)
    def run(conversation: tuple[list[str], list[Turn]], options: dict[str, Any]) -> None:
        check(template, conversation, **options)

    run()


def test_what_is_said_before_a_call_is_kept_by_a_template_that_drops_it() -> None:
    turns: list[Turn] = [("user", "Question?"), ("calls", ("Before.", 1)), ("user", "And?")]
    assert "Before." in prompt(load("calls alone"), over_grpc([], turns, has_tools=True, thinks=None))


@pytest.mark.parametrize("door", DOORS)
def test_calls_under_a_template_without_any_are_refused(door: Any) -> None:
    turns: list[Turn] = [("user", "Question?"), ("calls", ("", 1)), ("user", "And?")]
    found = prompt(load("Gemma 3"), door([], turns, has_tools=False, thinks=None))
    assert found == "refused: must be empty: the model's chat template leaves calls out"
