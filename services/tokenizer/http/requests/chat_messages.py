"""The messages of a chat, as clients of OpenAI's API write them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.errors import invalid_field
from services.tokenizer.http.requests.fields import Fields

_ROLES = {
    "system": tokenizer_pb2.ROLE_SYSTEM,
    "developer": tokenizer_pb2.ROLE_SYSTEM,
    "user": tokenizer_pb2.ROLE_USER,
    "assistant": tokenizer_pb2.ROLE_ASSISTANT,
    "tool": tokenizer_pb2.ROLE_TOOL,
}


class ContentPart(Fields):
    """A part of a message; only text can be read."""

    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if value is not None and not isinstance(value, list):
        raise ValueError("must be a text or a list of parts")
    return value


def _arguments_text(value: object) -> object:
    """Some clients send the object itself, not its JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class CalledFunction(Fields):
    """What a call calls."""

    name: str
    arguments: Annotated[str, BeforeValidator(_arguments_text, json_schema_input_type=str | dict[str, Any])] | None = (
        None
    )


class MessageToolCall(Fields):
    """A call earlier in the chat."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Fields):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[ContentPart] | None, BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart] | None)
    ] = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None


def read_message(fields: ChatMessage, index: int) -> tokenizer_pb2.ChatMessage:
    """The message.

    Raises:
        HttpError: a part of it is no text.
    """
    texts = [_text_of(part, f"messages[{index}].content[{number}]") for number, part in enumerate(fields.content or ())]
    # As vLLM joins the parts for a template that takes one text.
    content = "\n".join(text for text in texts if text is not None) or fields.refusal or ""
    message = tokenizer_pb2.ChatMessage(
        role=_ROLES[fields.role],
        content=content,
        name=fields.name or "",
        tool_call_id=fields.tool_call_id or "",
        reasoning=fields.reasoning or fields.reasoning_content or "",
    )
    for call in fields.tool_calls or ():
        message.tool_calls.add(id=call.id or "", name=call.function.name, arguments=call.function.arguments or "")
    return message


def _text_of(part: ContentPart, field: str) -> str | None:
    """None for a part that is not rendered."""
    text: dict[str, Any] = {"text": part.text, "refusal": part.refusal, "thinking": ""}
    if part.type not in text:
        raise invalid_field(field, "only text can be read, not images, audio or files")
    if text[part.type] is None:
        raise invalid_field(f"{field}.{part.type}", "is required")
    return text[part.type] or None
