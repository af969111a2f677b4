"""The messages of a chat, as clients of OpenAI's API write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import MAX_TOOL_CALLS
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.http.requests.fields import EchoedFields, Several
from services.tokenizer.http.requests.thinking_signatures import hidden_thinking

_ROLES = {
    "system": tokenizer_pb2.ROLE_SYSTEM,
    "developer": tokenizer_pb2.ROLE_SYSTEM,
    "user": tokenizer_pb2.ROLE_USER,
    "assistant": tokenizer_pb2.ROLE_ASSISTANT,
    "tool": tokenizer_pb2.ROLE_TOOL,
}
# Types of Anthropic's parts.
_CALL, _RESULT, _THOUGHT = "tool_use", "tool_result", "thinking"
# What the types of other parts contain, in OpenAI's, vLLM's and Anthropic's APIs, and what such a part is.
_UNREAD = {"image": "an image", "audio": "sound", "video": "a video", "document": "a document", "file": "a file"}


def as_parts(value: object) -> object:
    """Parts, of which a text alone is one; other values are no content."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if value is not None and not isinstance(value, list):
        raise ValueError("must be a text or a list of parts")
    return value


Parts = Annotated[
    Several["ContentPart"] | None, BeforeValidator(as_parts, json_schema_input_type=str | list["ContentPart"] | None)
]


class PartSource(EchoedFields):
    """Where the content of a document is; only text can be read."""

    type: str | None = None
    data: str | None = None


class ContentPart(EchoedFields):
    """A part of a message: text, or one of Anthropic's for reasoning, for a call, or for a call's result."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    is_error: bool | None = None
    content: Parts = None
    title: str | None = None
    source: PartSource | str | None = None
    tool_name: str | None = None


def _arguments_text(value: object) -> object:
    """Some clients send the object itself, not its JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class CalledFunction(EchoedFields):
    """What a call calls."""

    name: str
    arguments: Annotated[str, BeforeValidator(_arguments_text, json_schema_input_type=str | dict[str, Any])] | None = (
        None
    )


class MessageToolCall(EchoedFields):
    """A call earlier in the chat."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(EchoedFields):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Parts = None
    name: str | None = None
    tool_calls: Annotated[Several[MessageToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None


@dataclass(frozen=True, slots=True)
class ReadParts:
    """What the parts of a message are in a chat of the cell."""

    results: list[tokenizer_pb2.ChatMessage]
    calls: list[tokenizer_pb2.ToolCall]
    reasoning: str
    text: str
    has_results_alone: bool


Placed = tuple[ContentPart, str]
"""A part, and the name of its place in the request."""


def place_parts(parts: Sequence[ContentPart] | None, index: int) -> list[Placed]:
    """The parts of the message with this index."""
    return [(part, f"messages[{index}].content[{number}]") for number, part in enumerate(parts or ())]


def read_parts(parts: Sequence[Placed]) -> ReadParts:
    """Read parts.

    Raises:
        HttpError: a part cannot be in a prompt.
    """
    results = [_read_result(part, place) for part, place in parts if part.type == _RESULT]
    thoughts = [_thought_of(part, place) for part, place in parts if part.type == _THOUGHT]
    others = [(part, place) for part, place in parts if part.type not in (_RESULT, _CALL, _THOUGHT)]
    return ReadParts(
        results,
        [_read_call(part, place) for part, place in parts if part.type == _CALL],
        _joined(thoughts),
        _joined(_text_of(part, place) for part, place in others),
        has_results_alone=bool(results) and len(results) == len(parts),
    )


def read_message(fields: ChatMessage, index: int) -> list[tokenizer_pb2.ChatMessage]:
    """The message, after the results of calls that are among its parts; left out if there is nothing else in it.

    Raises:
        HttpError: a part cannot be in a prompt.
    """
    read = read_parts(place_parts(fields.content, index))
    if read.has_results_alone:
        return read.results
    message = tokenizer_pb2.ChatMessage(
        role=_ROLES[fields.role],
        content=read.text or fields.refusal or "",
        name=fields.name or "",
        tool_call_id=fields.tool_call_id or "",
        reasoning=fields.reasoning or fields.reasoning_content or read.reasoning,
        tool_calls=read.calls,
    )
    for call in fields.tool_calls or ():
        message.tool_calls.add(id=call.id or "", name=call.function.name, arguments=call.function.arguments or "")
    return [*read.results, message]


def _read_result(part: ContentPart, place: str) -> tokenizer_pb2.ChatMessage:
    texts = [_text_of(inner, f"{place}.content[{number}]") for number, inner in enumerate(part.content or ())]
    # Templates know no other way to say that a call failed.
    content = _joined(["Error:"] * bool(part.is_error) + texts)
    return tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_TOOL, content=content, tool_call_id=part.tool_use_id or "")


def _read_call(part: ContentPart, place: str) -> tokenizer_pb2.ToolCall:
    arguments = json.dumps(part.input, ensure_ascii=False) if part.input else ""
    return tokenizer_pb2.ToolCall(id=part.id or "", name=_given(part.name, f"{place}.name"), arguments=arguments)


def _thought_of(part: ContentPart, place: str) -> str:
    return _given(part.thinking, f"{place}.{_THOUGHT}") or hidden_thinking(part.signature or "")


def _text_of(part: ContentPart, place: str) -> str:
    match part:
        case ContentPart(type="document", source=PartSource(type="text", data=str(text))):
            return _joined([part.title or "", text])
        case ContentPart(type="search_result"):
            texts = (_text_of(inner, f"{place}.content[{number}]") for number, inner in enumerate(part.content or ()))
            return _joined([part.title or "", *texts])
    texts_by_type = {"text": part.text, "refusal": part.refusal, "tool_reference": part.tool_name}
    if part.type not in texts_by_type:
        kind = next((name for mark, name in _UNREAD.items() if mark in part.type), "of an unknown type")
        raise invalid_field(place, f"is {kind}, but only text can be read")
    name = "tool_name" if part.type == "tool_reference" else part.type
    return _given(texts_by_type[part.type], f"{place}.{name}")


def _given(text: str | None, place: str) -> str:
    if text is None:
        raise invalid_field(place, "is required")
    return text


def _joined(texts: Iterable[str]) -> str:
    """As vLLM joins the parts for a template that takes one text."""
    return "\n".join(text for text in texts if text)
