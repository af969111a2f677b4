"""Brings a conversation's messages into the form that a chat template takes."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from services.tokenizer.chat.conversation import FUNCTIONS, Message, ToolCall
from services.tokenizer.json.json_values import JsonObject, JsonValue

# Applied to everything that the client wrote.
Guard = Callable[[JsonValue], JsonValue]

UNNAMED_ARGUMENTS = "arguments"
"""The name of arguments that are no object, in a template that needs names."""
SHORT_ID_LENGTH = 9
_SHORT_ID = re.compile(rf"[A-Za-z0-9]{{{SHORT_ID_LENGTH}}}")


@dataclass(frozen=True, slots=True)
class TemplateFeatures:
    """How a template handles tools, their calls, and system messages."""

    takes_tools: bool = False
    """Whether the prompt lists them."""
    arguments_are_text: bool = False
    """Whether a call's arguments are JSON text rather than an object."""
    empty_content_is_none: bool = False
    """Whether a message with calls and no text needs content None: with "" the calls are left out."""
    ids_are_short: bool = False
    """Whether calls need ids of nine letters and digits."""
    one_call_per_message: bool = False
    """Whether only a message's first call is rendered, or only a single one accepted."""
    content_is_apart: bool = False
    """Whether the calls of a message with content are left out: the content needs a message of its own."""
    content_is_reasoning: bool = False
    """Whether a message with calls may have reasoning or content, but not both."""
    arguments_have_names: bool = False
    """Whether arguments that are no object are left out or refused: they need a name."""
    ids_have_names: bool = False
    """Whether a call is shown by its id and arguments alone, so that the id must have the tool's name."""
    system_needs_user: bool = False
    """Whether a system message is left out unless a user's message comes after it."""
    system_comes_first: bool = False
    """Whether a system message after others is left out or refused: its text needs a user's message."""
    loses_calls: bool = False
    """Whether calls are left out in every form."""
    loses_content: bool = False
    """Whether the content of a message with calls is left out in every form."""
    variables: tuple[str, ...] = field(default=(), compare=False)
    """The names of the variables that the template reads, sorted; no part of how it handles messages."""


def message_fields(messages: Sequence[Message], features: TemplateFeatures, guard: Guard) -> list[JsonValue]:
    """The template's variable `messages`.

    System messages before all others are one, since templates take only one there: what instructs the model comes in
    several messages by some APIs, and in one by others. A result has the name of the call that it answers by its id.

    Where the template needs that, messages with several calls are split, each with the results of its call after it,
    content gets a message before its calls, or is joined to their reasoning, ids are replaced by others, equal for
    equal ones, and what a later system message says is at the end of the user's message before it.
    """
    messages = _with_result_names(_with_one_opening(messages))
    if features.system_comes_first:
        messages = _with_system_first(messages)
    if features.ids_are_short:
        messages = list(_with_short_ids(messages))
    if features.ids_have_names:
        messages = list(_with_named_ids(messages))
    if features.one_call_per_message:
        messages = list(_with_single_calls(messages))
    if features.content_is_apart:
        messages = list(_with_content_apart(messages))
    if features.content_is_reasoning:
        messages = [_with_one_text(message) for message in messages]
    return [_fields(message, features, guard) for message in messages]


def _fields(message: Message, features: TemplateFeatures, guard: Guard) -> JsonObject:
    fields: JsonObject = {"role": message.role, "content": guard(message.content)}
    others: JsonObject = {
        "reasoning_content": message.reasoning,
        # Its name in the template of gpt-oss.
        "thinking": message.reasoning,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }
    fields |= {name: guard(value) for name, value in others.items() if value}
    if message.tool_calls:
        if not message.content and features.empty_content_is_none:
            fields["content"] = None
        fields["tool_calls"] = [_call_fields(call, features, guard) for call in message.tool_calls]
    return fields


def _call_fields(call: ToolCall, features: TemplateFeatures, guard: Guard) -> JsonObject:
    arguments = guard(call.arguments)
    if isinstance(arguments, str):
        arguments = {UNNAMED_ARGUMENTS: arguments} if features.arguments_have_names else arguments
    elif features.arguments_are_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function: JsonObject = {"name": guard(call.name), "arguments": arguments}
    return {"type": "function", **({"id": guard(call.id)} if call.id else {}), "function": function}


def _with_one_opening(messages: Sequence[Message]) -> Sequence[Message]:
    opening = list(itertools.takewhile(lambda message: message.role == "system", messages))
    if len(opening) < 2:
        return messages
    content = "\n\n".join(message.content for message in opening if message.content)
    return [replace(opening[0], content=content), *messages[len(opening) :]]


def _with_result_names(messages: Sequence[Message]) -> list[Message]:
    """Some APIs name the function in a result, others only the call."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls if call.id}
        if message.role == "tool" and not message.name and message.tool_call_id in names:
            message = replace(message, name=names[message.tool_call_id])  # noqa: PLW2901 - the same, named
        named.append(message)
    return named


def _with_results(messages: Sequence[Message]) -> Iterator[tuple[Message, Sequence[Message]]]:
    """Each message with the results that follow its calls; the results are left out otherwise."""
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        end = index
        while message.tool_calls and end < len(messages) and messages[end].role == "tool":
            end += 1
        yield message, messages[index:end]
        index = end


def _answered_call(result: Message, calls: Sequence[ToolCall], answered: Sequence[int]) -> int:
    """The index of the call that a result answers: by its id, otherwise by its place."""
    candidates = range(len(calls))
    same_id = [index for index in candidates if calls[index].id and calls[index].id == result.tool_call_id]
    for indices in (same_id, candidates):
        if free := [index for index in indices if index not in answered]:
            return free[0]
    return same_id[0] if same_id else len(calls) - 1


def _with_single_calls(messages: Sequence[Message]) -> Iterator[Message]:
    for message, results in _with_results(messages):
        if len(message.tool_calls) < 2:
            yield from (message, *results)
            continue
        answered: list[int] = []
        for result in results:
            answered.append(_answered_call(result, message.tool_calls, answered))
        for index, call in enumerate(message.tool_calls):
            if index == 0:
                yield replace(message, tool_calls=(call,))
            else:
                yield Message(message.role, "", (call,), name=message.name)
            yield from (result for result, answers in zip(results, answered, strict=True) if answers == index)


def _with_content_apart(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        if message.tool_calls and message.content:
            yield Message(message.role, message.content, name=message.name)
            yield replace(message, content="")
        else:
            yield message


def _with_one_text(message: Message) -> Message:
    if not (message.tool_calls and message.reasoning and message.content):
        return message
    return replace(message, content="", reasoning=f"{message.reasoning}\n\n{message.content}")


def _with_system_first(messages: Sequence[Message]) -> list[Message]:
    """Templates that want the system first may want turns to alternate, too."""
    kept: list[Message] = []
    # Whether a system message is in the last one, so that a user's message that follows belongs to it.
    is_joined = False
    for message in messages:
        is_late = message.role == "system" and any(before.role != "system" for before in kept)
        role = "user" if is_late else message.role
        is_joined = is_late or (is_joined and role == "user")
        if is_joined and kept[-1].role == role:
            kept[-1] = replace(kept[-1], content=f"{kept[-1].content}\n\n{message.content}")
        else:
            kept.append(replace(message, role=role))
    return kept


def _with_short_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Calls without an id get one, and so do results without one."""
    for place, (message, results) in enumerate(_with_results(messages)):
        calls = [
            replace(call, id=_short_id(call.id or f"{place} {index}")) for index, call in enumerate(message.tool_calls)
        ]
        yield replace(message, tool_calls=tuple(calls))
        answered: list[int] = []
        for result in results:
            answered.append(_answered_call(result, message.tool_calls, answered))
            given = result.tool_call_id
            yield replace(result, tool_call_id=_short_id(given) if given else calls[answered[-1]].id)


def _with_named_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Ids of other forms are replaced, as the documentation of Kimi K2's tool calls asks for."""
    taken = {call.id for message in messages for call in message.tool_calls}
    num_calls = 0
    for message, results in _with_results(messages):
        calls = []
        for call in message.tool_calls:
            calls.append(replace(call, id=_named_id(call, num_calls, taken)))
            taken.add(calls[-1].id)
            num_calls += 1
        yield replace(message, tool_calls=tuple(calls))
        answered: list[int] = []
        for result in results:
            answered.append(_answered_call(result, message.tool_calls, answered))
            yield replace(result, tool_call_id=calls[answered[-1]].id)


def _named_id(call: ToolCall, num_calls: int, taken: Container[str]) -> str:
    """The call's own id if it has the name, or else one that is not taken."""
    if re.fullmatch(rf"{re.escape(FUNCTIONS + call.name)}:[0-9]+", call.id):
        return call.id
    ids = (f"{FUNCTIONS}{call.name}:{index}" for index in itertools.count(num_calls))
    return next(each for each in ids if each not in taken)


def _short_id(text: str) -> str:
    return text if _SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:SHORT_ID_LENGTH]
