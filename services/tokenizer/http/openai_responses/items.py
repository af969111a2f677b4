"""The items of a request's input, and the messages that they are for the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.fields.custom_input import input_arguments
from services.tokenizer.http.fields.fields import EchoedFields, Several
from services.tokenizer.http.fields.message_drafts import MessageDraft, MessageDrafts, begins_another
from services.tokenizer.http.openai.chat_messages import ArgumentsText, as_parts, unread_kind, unread_note
from services.tokenizer.http.openai_responses.reasoning_content import REASONING_CONTENT
from services.tokenizer.http.openai_responses.tools import ResponseTool, function_name
from services.tokenizer.http.refusals import invalid_field

_ROLES = {
    "system": tokenizer_pb2.ROLE_SYSTEM,
    "developer": tokenizer_pb2.ROLE_SYSTEM,
    "user": tokenizer_pb2.ROLE_USER,
    "assistant": tokenizer_pb2.ROLE_ASSISTANT,
}
_MESSAGE, _REASONING = "message", "reasoning"
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_TOOLS = "additional_tools"
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
# How the types of items end or begin, and what they are, that a provider's own servers and tools leave in a history.
_FOREIGN = re.compile(
    r".*_(call|call_output|output|list_tools)|mcp_.*|compaction.*|context_compaction|configuration_update|program"
)
_READ = frozenset({_MESSAGE, _REASONING, *_CALLS, *_RESULTS, _TOOLS, "item_reference"})


class ItemPart(EchoedFields):
    """A part of an item."""

    type: str
    text: str | None = None
    refusal: str | None = None
    # What answers have beside the text.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Parts = Annotated[
    Several[ItemPart] | None, BeforeValidator(as_parts, json_schema_input_type=str | list[ItemPart] | None)
]


class InputItem(EchoedFields):
    """An item: a message, a reasoning, a call, a call's result, or further tools."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts = None
    summary: Several[ItemPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: ArgumentsText | None = None
    input: str | None = None
    output: Parts = None
    tools: Several[ResponseTool] | None = None
    # What answers and clients add, and the model is not shown.
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @property
    def kind(self) -> str:
        """Its type, which a message may leave out."""
        return self.type or (_MESSAGE if self.role is not None else "")


def as_items(value: object) -> object:
    """A text as the user's message; of another provider's items only the types are read."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [{"type": _MESSAGE, "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{"type": item["type"]} if is_foreign(item) else item for item in value]


def is_foreign(item: object) -> bool:
    """Whether an item is of another provider's servers or tools, which the model has never seen."""
    kind = item.get("type") if isinstance(item, dict) else None
    return isinstance(kind, str) and kind not in _READ and _FOREIGN.fullmatch(kind) is not None


class MessageReader:
    """Reads items, one after another, into messages.

    Items that an answer consists of are one message, since the model wrote them as one: reasoning, texts and calls up
    to the next item of another kind. Two messages after each other stay two. What instructs the model before all else
    is one message, since templates take only one.
    """

    def __init__(self, instructions: str | None) -> None:
        self.ignored: list[str] = []
        """Names of fields that have no effect."""
        self.skipped: list[str] = []
        """Where items of other providers are."""
        self.drafts = MessageDrafts("input")
        """The messages."""
        # What the last item was.
        self._before = ""
        self._call_names: dict[str, str] = {}
        if instructions:
            self._add(tokenizer_pb2.ROLE_SYSTEM, "instructions", instructions)

    def read(self, item: InputItem, place: str) -> None:
        """Read the next item.

        Raises:
            HttpError: it cannot be in a prompt, or there are too many messages.
        """
        kind = item.kind
        if is_foreign({"type": kind}):
            self.skipped.append(place)
            return
        if kind == _MESSAGE:
            self._read_message(item, place)
        elif kind == _REASONING:
            reasoning = self._reasoning_of(item, place)
            last = self.drafts.last
            is_new = last is not None and bool(reasoning) and begins_another(last.contents, last.calls)
            self._reply(place, is_new=is_new).reasonings.append(reasoning)
        elif kind in _CALLS:
            self._read_call(item, place)
        elif kind in _RESULTS:
            self._read_result(item, place)
        elif kind == "item_reference":
            raise invalid_field(place, "refers to a stored item, and nothing is stored")
        elif kind != _TOOLS:
            raise invalid_field(f"{place}.type", "is not a type of item that can be read")
        self._before = kind

    def _read_message(self, item: InputItem, place: str) -> None:
        role = _ROLES[_given(item.role, f"{place}.role")]
        text, last = "\n".join(_texts(item.content, f"{place}.content")), self.drafts.last
        if role == tokenizer_pb2.ROLE_ASSISTANT:
            self._reply(place, is_new=self._before == _MESSAGE).contents.append(text)
        elif role == tokenizer_pb2.ROLE_SYSTEM and len(self.drafts) == 1 and last is not None and last.role == role:
            last.contents.append(text)
        else:
            self._add(role, place, text)

    def _read_call(self, item: InputItem, place: str) -> None:
        name = function_name(_given(item.name, f"{place}.name"), item.namespace)
        call_id = _given(item.call_id, f"{place}.call_id")
        if item.type == _CALLS[0]:
            arguments = _given(item.arguments, f"{place}.arguments")
        else:
            arguments = input_arguments(_given(item.input, f"{place}.input"))
        self._reply(place).calls.append(tokenizer_pb2.ToolCall(id=call_id, name=name, arguments=arguments))
        self._call_names[call_id] = name

    def _read_result(self, item: InputItem, place: str) -> None:
        call_id = _given(item.call_id, f"{place}.call_id")
        if item.output is None:
            raise invalid_field(f"{place}.output", "is required")
        text = "\n".join(_texts(self._result_parts(item.output, f"{place}.output"), f"{place}.output"))
        result = self._add(tokenizer_pb2.ROLE_TOOL, place, text)
        result.tool_call_id, result.name = call_id, self._call_names.get(call_id, "")

    def _result_parts(self, parts: Sequence[ItemPart], place: str) -> list[ItemPart]:
        """The parts of a result. What is no text is a line that says so: the conversation has to go on."""
        read = []
        for index, part in enumerate(parts):
            kind = None if part.type in _TEXTS else unread_kind(part.type)
            if kind is not None:
                self.ignored.append(f"{place}[{index}]")
            read.append(part if kind is None else ItemPart(type="text", text=unread_note(kind)))
        return read

    def _reply(self, place: str, *, is_new: bool = False) -> MessageDraft:
        """The message of the answer that the item is a part of."""
        last = self.drafts.last
        if is_new or last is None or last.role != tokenizer_pb2.ROLE_ASSISTANT:
            return self._add(tokenizer_pb2.ROLE_ASSISTANT, place)
        return last

    def _reasoning_of(self, item: InputItem, place: str) -> str:
        if item.content:
            return "".join(_texts(item.content, f"{place}.content"))
        if item.encrypted_content:
            try:
                text = REASONING_CONTENT.decode(item.encrypted_content)
            except ValueError as error:
                raise invalid_field(f"{place}.encrypted_content", str(error)) from None
            if text is not None:
                return text
            self.ignored.append(f"{place}.encrypted_content")
        return "\n".join(_texts(item.summary, f"{place}.summary"))

    def _add(self, role: tokenizer_pb2.Role, place: str, *contents: str) -> MessageDraft:
        # What a system's message consists of are messages of the request; an answer's texts follow each other.
        separator = "\n\n" if role == tokenizer_pb2.ROLE_SYSTEM else ""
        return self.drafts.add(MessageDraft(role, place, separator, list(contents)))


def _texts(parts: Sequence[ItemPart] | None, place: str) -> Iterable[str]:
    for index, part in enumerate(parts or ()):
        at = f"{place}[{index}]"
        if part.type in _TEXTS:
            yield _given(part.text, f"{at}.text")
        elif part.type == "refusal":
            yield _given(part.refusal, f"{at}.refusal")
        else:
            raise invalid_field(at, f"is {unread_kind(part.type) or 'of an unknown type'}, but only text can be read")


def _given(text: str | None, place: str) -> str:
    if text is None:
        raise invalid_field(place, "is required")
    return text
