"""The items of a request's input, and the messages that they are for the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.refusals import invalid_field
from services.tokenizer.http.requests.fields import EchoedFields, Several
from services.tokenizer.http.requests.message_drafts import MessageDraft
from services.tokenizer.http.responses.custom_input import input_arguments
from services.tokenizer.http.responses.reasoning_content import REASONING_CONTENT
from services.tokenizer.http.responses.tools import ResponseTool, function_name

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
# What the types of other parts contain, and what such a part is.
_UNREAD = {"image": "an image", "screenshot": "an image", "audio": "sound", "video": "a video", "file": "a file"}


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if value is not None and not isinstance(value, list):
        raise ValueError("must be a text or a list of parts")
    return value


class ItemPart(EchoedFields):
    """A part of an item."""

    type: str
    text: str | None = None
    refusal: str | None = None
    # What answers have beside the text.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Parts = Annotated[
    Several[ItemPart] | None, BeforeValidator(_as_parts, json_schema_input_type=str | list[ItemPart] | None)
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
    arguments: str | None = None
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
    """A text as the user's message."""
    if value is None or value == "":
        return []
    return [{"type": _MESSAGE, "role": "user", "content": value}] if isinstance(value, str) else value


class MessageReader:
    """Reads items, one after another, into messages.

    Items that an answer consists of are one message, since the model wrote them as one: reasoning, texts and calls up
    to the next item of another kind. Two messages after each other stay two. What instructs the model before all else
    is one message, since templates take only one.
    """

    def __init__(self, instructions: str | None) -> None:
        self.ignored: list[str] = []
        """Names of fields that have no effect."""
        self._drafts: list[MessageDraft] = []
        # What the last item was.
        self._before = ""
        self._call_names: dict[str, str] = {}
        if instructions:
            self._add(tokenizer_pb2.ROLE_SYSTEM, "instructions", instructions)

    @property
    def messages(self) -> Iterator[tokenizer_pb2.ChatMessage]:
        """The messages, each made when it is taken: a list of them would be the request's text once more."""
        return (draft.message() for draft in self._drafts)

    @property
    def places(self) -> list[str]:
        """Where each message begins in the request."""
        return [draft.place for draft in self._drafts]

    def read(self, item: InputItem, place: str) -> None:
        """Read the next item.

        Raises:
            HttpError: it cannot be in a prompt.
        """
        kind = item.kind
        if kind == _MESSAGE:
            self._read_message(item, place)
        elif kind == _REASONING:
            self._reply(place).reasonings.append(self._reasoning_of(item, place))
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
        text = "\n".join(_texts(item.content, f"{place}.content"))
        if role == tokenizer_pb2.ROLE_ASSISTANT:
            self._reply(place, is_new=self._before == _MESSAGE).contents.append(text)
        elif role == tokenizer_pb2.ROLE_SYSTEM and len(self._drafts) == 1 and self._drafts[0].role == role:
            self._drafts[0].contents.append(text)
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
        text = "\n".join(_texts(item.output, f"{place}.output"))
        result = self._add(tokenizer_pb2.ROLE_TOOL, place, text)
        result.tool_call_id, result.name = call_id, self._call_names.get(call_id, "")

    def _reply(self, place: str, *, is_new: bool = False) -> MessageDraft:
        """The message of the answer that the item is a part of."""
        last = self._drafts[-1] if self._drafts else None
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
        self._drafts.append(MessageDraft(role, place, separator, list(contents)))
        return self._drafts[-1]


def _texts(parts: Sequence[ItemPart] | None, place: str) -> Iterable[str]:
    for index, part in enumerate(parts or ()):
        at = f"{place}[{index}]"
        if part.type in _TEXTS:
            yield _given(part.text, f"{at}.text")
        elif part.type == "refusal":
            yield _given(part.refusal, f"{at}.refusal")
        else:
            kind = next((name for mark, name in _UNREAD.items() if mark in part.type), "of an unknown type")
            raise invalid_field(at, f"is {kind}, but only text can be read")


def _given(text: str | None, place: str) -> str:
    if text is None:
        raise invalid_field(place, "is required")
    return text
