"""One conversation as the clients of gRPC and of the three APIs write it, and its prompt by each."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_encoding import render_chat
from services.tokenizer.chat.chat_request import check_chat
from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.http.anthropic.request import read_messages_request
from services.tokenizer.http.openai.chat_request import read_chat_request
from services.tokenizer.http.openai_responses.request import read_response_request
from services.tokenizer.text.control_tokens import ControlTokens
from shared.errors import InvalidRequestError
from tests.support.tokenizer.chat_templates import LocalRenderer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
ROLES = tokenizer_pb2.Role


@dataclass(frozen=True)
class Turn:
    """What the user or the assistant says; before that the assistant may reason, and afterwards call."""

    role: str
    text: str = ""
    num_calls: int = 0
    reasoning: str = ""


def load(source: str, special: dict[str, str] = SPECIAL) -> ChatTemplate:
    """A template, tried."""
    renderer = LocalRenderer(special)
    return ChatTemplate(source, renderer, features=renderer.try_template(source))


def calls_of(turn: int, count: int) -> list[tuple[str, str]]:
    """The ids and the arguments of a turn's calls."""
    return [(f"call_{turn}_{index}", json.dumps({"word": f"w{index}"})) for index in range(count)]


def over_grpc(systems: list[str], turns: list[Turn], *, has_tools: bool, thinks: bool | None) -> tokenizer_pb2.Chat:
    """A conversation as a client of gRPC writes it."""
    chat = tokenizer_pb2.Chat(keep_invalid_arguments=True)
    for text in systems:
        chat.messages.add(role=ROLES.ROLE_SYSTEM, content=text)
    for number, turn in enumerate(turns):
        if turn.role == "user":
            chat.messages.add(role=ROLES.ROLE_USER, content=turn.text)
        else:
            message = chat.messages.add(role=ROLES.ROLE_ASSISTANT, content=turn.text, reasoning=turn.reasoning)
            for call_id, arguments in calls_of(number, turn.num_calls):
                message.tool_calls.add(id=call_id, name="look_up", arguments=arguments)
            for call_id, _ in calls_of(number, turn.num_calls):
                chat.messages.add(role=ROLES.ROLE_TOOL, tool_call_id=call_id, content="found")
    if has_tools:
        chat.tools.add(name="look_up", description="Look up.", parameters=json.dumps(SCHEMA))
    if thinks is not None:
        chat.template_variables = json.dumps({"enable_thinking": thinks, "thinking": thinks})
    return chat


def over_chat(systems: list[str], turns: list[Turn], *, has_tools: bool, thinks: bool | None) -> tokenizer_pb2.Chat:
    """As a client of chats does."""
    roles = itertools.cycle(("system", "developer"))
    messages: list[Any] = [{"role": next(roles), "content": text} for text in systems]
    for number, turn in enumerate(turns):
        calls = [
            {"id": call_id, "type": "function", "function": {"name": "look_up", "arguments": arguments}}
            for call_id, arguments in calls_of(number, turn.num_calls)
        ]
        message = {"role": turn.role, "content": turn.text, "tool_calls": calls or None}
        messages.append(message | ({"reasoning_content": turn.reasoning} if turn.reasoning else {}))
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "found"} for call in calls]
    function = {"name": "look_up", "description": "Look up.", "parameters": SCHEMA}
    body: dict[str, Any] = {"messages": messages, "enable_thinking": thinks}
    body["tools"] = [{"type": "function", "function": function}] if has_tools else None
    return read_chat_request(body, "r").message.chat


def over_messages(systems: list[str], turns: list[Turn], *, has_tools: bool, thinks: bool | None) -> tokenizer_pb2.Chat:
    """As a client of Messages does."""
    messages: list[Any] = [{"role": "system", "content": text} for text in systems[1:]]
    for number, turn in enumerate(turns):
        calls = [
            {"type": "tool_use", "id": call_id, "name": "look_up", "input": json.loads(arguments)}
            for call_id, arguments in calls_of(number, turn.num_calls)
        ]
        thought = [{"type": "thinking", "thinking": turn.reasoning, "signature": "s"}] if turn.reasoning else []
        text = [{"type": "text", "text": turn.text}] if turn.text else []
        messages.append({"role": turn.role, "content": [*thought, *text, *calls]})
        if not calls:
            continue
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "found"} for call in calls]
        messages.append({"role": "user", "content": results})
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1, "system": systems[0] if systems else None}
    body["tools"] = [{"name": "look_up", "description": "Look up.", "input_schema": SCHEMA}] if has_tools else None
    body["thinking"] = None if thinks is None else {"type": "enabled" if thinks else "disabled"}
    return read_messages_request(body, "r").message.chat


def over_responses(
    systems: list[str], turns: list[Turn], *, has_tools: bool, thinks: bool | None
) -> tokenizer_pb2.Chat:
    """As a client of Responses does."""
    items: list[Any] = [{"role": "developer", "content": text} for text in systems[1:]]
    for number, turn in enumerate(turns):
        if turn.reasoning:
            content = [{"type": "reasoning_text", "text": turn.reasoning}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        if turn.text:
            items.append({"type": "message", "role": turn.role, "content": turn.text})
        calls = calls_of(number, turn.num_calls)
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
    """The prompt, or why the conversation is refused."""
    try:
        return render_chat(template, ControlTokens({}), check_chat(chat)).text
    except InvalidRequestError as error:
        return "refused: " + "; ".join(each.description for each in error.violations)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[str], list[Turn]]:
    """Conversations that every door can express: the system's messages, and the turns."""
    systems = [f"Rule {index}." for index in range(draw(st.integers(0, 3)))]
    turns = [Turn("user", "Question 0?")]
    for number in range(draw(st.integers(0, 3))):
        thought, answer = (draw(st.sampled_from(["", f"{text} {number}."])) for text in ("Thought", "Afterthought"))
        if draw(st.booleans()):
            before = draw(st.sampled_from(["", f"Before {number}."]))
            turns.append(Turn("assistant", before, draw(st.integers(1, 2)), thought))
            if draw(st.booleans()):
                turns.append(Turn("assistant", f"Answer {number}.", reasoning=answer))
        else:
            turns.append(Turn("assistant", f"Answer {number}.", reasoning=thought))
        turns.append(Turn("user", f"Question {number + 1}?"))
    return systems, turns


def check(
    template: ChatTemplate, conversation: tuple[list[str], list[Turn]], *, keeps_text: bool = True, **options: Any
) -> None:
    """Every door has the same prompt, or refuses for the same reason.

    Nothing that is said is missing in it, unless `keeps_text` is not: the template leaves out what is before a call.
    """
    systems, turns = conversation
    prompts = [prompt(template, door(systems, turns, **options)) for door in DOORS]
    assert prompts == [prompts[0]] * len(DOORS)
    if prompts[0].startswith("refused: "):
        return
    # Templates leave earlier reasoning out.
    for text in [*systems, *(turn.text for turn in turns if keeps_text or not turn.num_calls)]:
        assert text in prompts[0], "nothing is lost silently"
    words = (f"w{index}" for turn in turns for index in range(turn.num_calls))
    assert all(word in prompts[0] for word in words), "nor is a call, with tools or without"


OPTIONS = st.fixed_dictionaries({"has_tools": st.booleans(), "thinks": st.sampled_from([None, True, False])})
