"""The messages of a chat, as clients of OpenAI's API write them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import MAX_TOOL_CALLS
from services.tokenizer.http.fields.custom_input import input_arguments
from services.tokenizer.http.fields.fields import EchoedFields, Several
from services.tokenizer.http.fields.message_drafts import begins_another
from services.tokenizer.http.fields.thinking_signatures import hidden_thinking
from services.tokenizer.http.refusals import invalid_field

_ROLES = {
    "system": tokenizer_pb2.ROLE_SYSTEM,
    "developer": tokenizer_pb2.ROLE_SYSTEM,
    "user": tokenizer_pb2.ROLE_USER,
    "assistant": tokenizer_pb2.ROLE_ASSISTANT,
    "tool": tokenizer_pb2.ROLE_TOOL,
}
# Types of Anthropic's parts.
_CALL, _RESULT, _THOUGHT = "tool_use", "tool_result", "thinking"
_TEXTS = ("text", "input_text", "output_text")
# What the types of other parts contain, in OpenAI's, vLLM's and Anthropic's APIs, and what such a part is.
_UNREAD = {
    "image": "an image",
    "screenshot": "an image",
    "audio": "sound",
    "video": "a video",
    "document": "a document",
    "file": "a file",
}


def as_parts(value: object) -> object:
    """Parts, of which a text alone is one; other values are no content."""
    if isinstance(value, str):
        return [_text_part(value)]
    if value is not None and not isinstance(value, list):
        raise ValueError("must be a text or a list of parts")
    return value and [_text_part(part) if isinstance(part, str) else part for part in value]


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


Parts = Annotated[
    Several["ContentPart"] | None, BeforeValidator(as_parts, json_schema_input_type=str | list["ContentPart"] | None)
]


class PartSource(EchoedFields):
    """Where the content of a document is; only text can be read."""

    type: str | None = None
    data: str | None = None
    content: Parts = None


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


ArgumentsText = Annotated[str, BeforeValidator(_arguments_text, json_schema_input_type=str | dict[str, Any])]


class CalledFunction(EchoedFields):
    """What a call calls."""

    name: str
    arguments: ArgumentsText | None = None


class CalledCustom(EchoedFields):
    """What a call of a custom tool calls."""

    name: str
    input: str


class MessageToolCall(EchoedFields):
    """A call earlier in the chat."""

    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    def message(self, place: str) -> tokenizer_pb2.ToolCall:
        """The call in a chat of the cell; `place` is where it is in the request.

        Raises:
            HttpError: it does not say what is called.
        """
        if self.type == "custom" and self.custom is not None:
            arguments = input_arguments(self.custom.input)
            return tokenizer_pb2.ToolCall(id=self.id or "", name=self.custom.name, arguments=arguments)
        if self.type == "custom" or self.function is None:
            raise invalid_field(f"{place}.{self.type or 'function'}", "is required")
        return tokenizer_pb2.ToolCall(
            id=self.id or "", name=self.function.name, arguments=self.function.arguments or ""
        )


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


@dataclass(slots=True)
class Reply:
    """What a model wrote in one go, or a text of anybody else: reasoning first, then text, then calls."""

    reasonings: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[tokenizer_pb2.ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReadParts:
    """What the parts of a message are in a chat of the cell."""

    results: list[tokenizer_pb2.ChatMessage]
    replies: list[Reply]
    """At least one, which is empty if there are only results."""
    has_results_alone: bool


Placed = tuple[ContentPart, str]
"""A part, and the name of its place in the request."""


def place_parts(parts: Sequence[ContentPart] | None, index: int) -> list[Placed]:
    """The parts of the message with this index."""
    return [(part, f"messages[{index}].content[{number}]") for number, part in enumerate(parts or ())]


def read_parts(parts: Sequence[Placed], ignored: list[str]) -> ReadParts:
    """Read parts.

    Args:
        parts: Those of a message.
        ignored: Gets the names of parts that the model is only told of.

    Raises:
        HttpError: a part cannot be in a prompt.
    """
    results = []
    replies = [Reply()]
    for part, place in parts:
        if part.type == _RESULT:
            results.append(_read_result(part, place, ignored))
        elif part.type == _THOUGHT:
            if begins_another(replies[-1].texts, replies[-1].calls):
                replies.append(Reply())
            replies[-1].reasonings.append(_thought_of(part, place))
        elif part.type == _CALL:
            replies[-1].calls.append(_read_call(part, place))
        else:
            replies[-1].texts.append(_text_of(part, place))
    return ReadParts(results, replies, has_results_alone=bool(results) and len(results) == len(parts))


def read_message(fields: ChatMessage, index: int, ignored: list[str]) -> list[tokenizer_pb2.ChatMessage]:
    """The message, after the results of calls that are among its parts; left out if there is nothing else in it.

    Args:
        fields: The message.
        index: Its place in the request.
        ignored: As for `read_parts`.

    Raises:
        HttpError: a part cannot be in a prompt.
    """
    placed = place_parts(fields.content, index)
    if fields.role == "tool":
        placed = [_as_text(part, place, ignored) for part, place in placed]
    read = read_parts(placed, ignored)
    if read.has_results_alone:
        return read.results
    messages = [
        tokenizer_pb2.ChatMessage(
            role=_ROLES[fields.role],
            content=joined(reply.texts),
            name=fields.name or "",
            reasoning=joined(reply.reasonings),
            tool_calls=reply.calls,
        )
        for reply in read.replies
    ]
    first, last = messages[0], messages[-1]
    first.reasoning = fields.reasoning or fields.reasoning_content or first.reasoning
    last.content = last.content or fields.refusal or ""
    last.tool_call_id = fields.tool_call_id or ""
    for number, call in enumerate(fields.tool_calls or ()):
        last.tool_calls.append(call.message(f"messages[{index}].tool_calls[{number}]"))
    return [*read.results, *messages]


def _read_result(part: ContentPart, place: str, ignored: list[str]) -> tokenizer_pb2.ChatMessage:
    inner = (_as_text(each, f"{place}.content[{number}]", ignored) for number, each in enumerate(part.content or ()))
    texts = [_text_of(each, at) for each, at in inner]
    # Templates know no other way to say that a call failed.
    content = joined(["Error:"] * bool(part.is_error) + texts)
    return tokenizer_pb2.ChatMessage(role=tokenizer_pb2.ROLE_TOOL, content=content, tool_call_id=part.tool_use_id or "")


def _as_text(part: ContentPart, place: str, ignored: list[str]) -> Placed:
    """A part of a call's result. What is no text is a line that says so: the conversation has to go on."""
    if (kind := unread_kind(part.type)) is None or _is_text_document(part):
        return part, place
    ignored.append(place)
    return ContentPart(type="text", text=unread_note(kind)), place


def unread_kind(kind: str) -> str | None:
    """What a part of another type than text is; None for unknown types."""
    return next((name for mark, name in _UNREAD.items() if mark in kind), None)


def unread_note(kind: str) -> str:
    """What the model is told in the place of such a part."""
    return f"[This is {kind}, which cannot be shown here.]"


def _read_call(part: ContentPart, place: str) -> tokenizer_pb2.ToolCall:
    arguments = json.dumps(part.input, ensure_ascii=False) if part.input else ""
    return tokenizer_pb2.ToolCall(id=part.id or "", name=_given(part.name, f"{place}.name"), arguments=arguments)


def _thought_of(part: ContentPart, place: str) -> str:
    return _given(part.thinking, f"{place}.{_THOUGHT}") or hidden_thinking(part.signature or "")


def _is_text_document(part: ContentPart) -> bool:
    source = part.source
    has_text = isinstance(source, PartSource) and (
        (source.type == "text" and source.data is not None) or source.content is not None
    )
    return part.type == "document" and (has_text or part.content is not None)


def _document_text(part: ContentPart, place: str) -> str:
    source = part.source
    if isinstance(source, PartSource) and source.data is not None and source.type == "text":
        return joined([part.title or "", source.data])
    if isinstance(source, PartSource) and source.content is not None:
        inner, at = source.content, f"{place}.source.content"
    else:
        inner, at = part.content or [], f"{place}.content"
    return joined([part.title or "", *(_text_of(each, f"{at}[{number}]") for number, each in enumerate(inner))])


def _text_of(part: ContentPart, place: str) -> str:
    if part.type == "search_result" or _is_text_document(part):
        return _document_text(part, place)
    if part.type in _TEXTS:
        return _given(part.text, f"{place}.text")
    others = {"refusal": part.refusal, "tool_reference": part.tool_name}
    if part.type not in others:
        raise invalid_field(place, f"is {unread_kind(part.type) or 'of an unknown type'}, but only text can be read")
    return _given(others[part.type], f"{place}.{'tool_name' if part.type == 'tool_reference' else part.type}")


def _given(text: str | None, place: str) -> str:
    if text is None:
        raise invalid_field(place, "is required")
    return text


def joined(texts: Iterable[str]) -> str:
    """As vLLM joins the parts for a template that takes one text."""
    return "\n".join(text for text in texts if text)
