"""The items of an answer, made from a call's responses, and the events by which a stream tells of them."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import Any

from typing_extensions import override

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.fields.custom_input import CustomInput
from services.tokenizer.http.openai.logprob_values import chat_logprobs
from services.tokenizer.http.openai_responses.reasoning_content import REASONING_CONTENT
from services.tokenizer.http.openai_responses.request import ResponseOptions
from services.tokenizer.http.openai_responses.tools import ToolKind

Event = dict[str, Any]
"""An event without its `sequence_number`; `type` comes first."""

_IN_PROGRESS, _COMPLETED = "in_progress", "completed"


class OutputItem(abc.ABC):
    """An item that is being written. Its value is what its deltas are, joined."""

    id_prefix = ""

    def __init__(self, request_id: str, index: int) -> None:
        """Begin an item; `index` is its place in the output."""
        self.id = f"{self.id_prefix}{request_id}_{index}"
        self.index = index
        self._texts: list[str] = []

    @abc.abstractmethod
    def value(self, status: str) -> dict[str, Any]:
        """The item as it is."""

    @abc.abstractmethod
    def begin(self) -> Iterator[Event]:
        """The events before any text."""

    @abc.abstractmethod
    def end(self, status: str) -> Iterator[Event]:
        """The events after the last text."""

    def add(self, text: str) -> None:
        """Take more text."""
        self._texts.append(text)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.id, "output_index": self.index, **fields}

    def _added(self) -> Event:
        return {"type": "response.output_item.added", "output_index": self.index, "item": self.value(_IN_PROGRESS)}

    def _done(self, status: str) -> Event:
        return {"type": "response.output_item.done", "output_index": self.index, "item": self.value(status)}

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)


class MessageItem(OutputItem):
    """A text."""

    id_prefix = "msg_"

    def __init__(self, request_id: str, index: int) -> None:
        super().__init__(request_id, index)
        self._logprobs: list[dict[str, Any]] = []
        self._has_part = False

    @override
    def value(self, status: str) -> dict[str, Any]:
        content = [self._part()] if self._has_part else []
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    @override
    def begin(self) -> Iterator[Event]:
        yield self._added()
        self._has_part = True
        yield self._event("response.content_part.added", content_index=0, part=self._part())

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        """Take more text; returns its event."""
        self.add(text)
        self._logprobs += logprobs
        return self._event("response.output_text.delta", content_index=0, delta=text, logprobs=_brief(logprobs))

    @override
    def end(self, status: str) -> Iterator[Event]:
        yield self._event("response.output_text.done", content_index=0, text=self.text, logprobs=_brief(self._logprobs))
        yield self._event("response.content_part.done", content_index=0, part=self._part())
        yield self._done(status)

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}


class ReasoningItem(OutputItem):
    """A reasoning."""

    id_prefix = "rs_"

    def __init__(self, request_id: str, index: int, *, is_encrypted: bool) -> None:
        """`is_encrypted` if the item has the reasoning also as `encrypted_content`."""
        super().__init__(request_id, index)
        self._is_encrypted = is_encrypted

    @override
    def value(self, status: str) -> dict[str, Any]:
        text = self.text
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [self._part()] if text else [],
            "encrypted_content": REASONING_CONTENT.encode(text) if self._is_encrypted and text else None,
        }

    @override
    def begin(self) -> Iterator[Event]:
        yield self._added()
        yield self._event("response.content_part.added", content_index=0, part=self._part())

    def delta(self, text: str) -> Event:
        """Take more text; returns its event."""
        self.add(text)
        return self._event("response.reasoning_text.delta", content_index=0, delta=text)

    @override
    def end(self, status: str) -> Iterator[Event]:
        yield self._event("response.reasoning_text.done", content_index=0, text=self.text)
        yield self._event("response.content_part.done", content_index=0, part=self._part())
        yield self._done(status)

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


class CallItem(OutputItem):
    """A call of a function."""

    id_prefix = "fc_"
    _type, _argument, _event_kind = "function_call", "arguments", "response.function_call_arguments"

    def __init__(self, request_id: str, index: int, call: tokenizer_pb2.ToolCallDelta, kind: ToolKind) -> None:
        super().__init__(request_id, index)
        self._call_id = call.id
        self._kind = kind

    @override
    def value(self, status: str) -> dict[str, Any]:
        namespace = {} if self._kind.namespace is None else {"namespace": self._kind.namespace}
        named = {"call_id": self._call_id, "name": self._kind.name, **namespace, self._argument: self.text}
        return {"id": self.id, "type": self._type, **self._status(status), **named}

    @override
    def begin(self) -> Iterator[Event]:
        yield self._added()

    def delta(self, arguments: str) -> Iterator[Event]:
        """Take more of the arguments; returns their event, if they have news."""
        if text := self._news(arguments):
            self.add(text)
            yield self._event(f"{self._event_kind}.delta", delta=text)

    @override
    def end(self, status: str) -> Iterator[Event]:
        yield self._event(f"{self._event_kind}.done", **{self._argument: self.text})
        yield self._done(status)

    def _status(self, status: str) -> dict[str, Any]:
        return {"status": status}

    def _news(self, arguments: str) -> str:
        return arguments


class CustomCallItem(CallItem):
    """A call of a custom tool."""

    id_prefix = "ctc_"
    _type, _argument, _event_kind = "custom_tool_call", "input", "response.custom_tool_call_input"

    def __init__(self, request_id: str, index: int, call: tokenizer_pb2.ToolCallDelta, kind: ToolKind) -> None:
        super().__init__(request_id, index, call, kind)
        self._input = CustomInput()

    @override
    def _status(self, status: str) -> dict[str, Any]:
        # It has none in OpenAI's API.
        return {}

    @override
    def _news(self, arguments: str) -> str:
        return self._input.push(arguments)


class Output:
    """The items of one answer.

    Invariant: only the last item may be open.
    """

    def __init__(self, request_id: str, options: ResponseOptions) -> None:
        self._request_id = request_id
        self._options = options
        self._values: list[dict[str, Any]] = []
        self.open_item: OutputItem | None = None
        # Log-probabilities of tokens whose text has not come yet.
        self._logprobs: list[common_pb2.PositionLogprobs] = []

    def take(self, response: tokenizer_pb2.GenerateResponse) -> Iterator[Event]:
        """Take the next response, whose reasoning comes before its text, and its text before its calls.

        Returns its events.
        """
        self._logprobs += response.logprobs
        if response.reasoning:
            item, events = self._reasoning_item()
            yield from events
            yield item.delta(response.reasoning)
        if response.text:
            message, events = self._message_item()
            yield from events
            yield message.delta(response.text, self._take_logprobs())
        for call in response.tool_calls:
            yield from self._take_call(call)
        if response.reasoning or response.tool_calls:
            self._logprobs = []

    def end(self, *, is_cut: bool = False) -> Iterator[Event]:
        """The answer has ended, or is cut off; returns the last events. An answer without items has an empty text."""
        if self.open_item is None and not self._values:
            _, events = self._message_item()
            yield from events
        yield from self._close("incomplete" if is_cut else _COMPLETED)

    def values(self) -> list[dict[str, Any]]:
        """The items as they are, those that are being written too."""
        open_items = [] if self.open_item is None else [self.open_item.value("incomplete")]
        return [*self._values, *open_items]

    def _reasoning_item(self) -> tuple[ReasoningItem, Iterable[Event]]:
        if isinstance(self.open_item, ReasoningItem):
            return self.open_item, ()
        closing = [*self._close(_COMPLETED)]
        is_encrypted = self._options.has_encrypted_reasoning
        item = ReasoningItem(self._request_id, len(self._values), is_encrypted=is_encrypted)
        return item, [*closing, *self._open(item)]

    def _message_item(self) -> tuple[MessageItem, Iterable[Event]]:
        if isinstance(self.open_item, MessageItem):
            return self.open_item, ()
        closing = [*self._close(_COMPLETED)]
        item = MessageItem(self._request_id, len(self._values))
        return item, [*closing, *self._open(item)]

    def _take_call(self, call: tokenizer_pb2.ToolCallDelta) -> Iterator[Event]:
        if call.id:
            yield from self._close(_COMPLETED)
            kind = self._options.tools.get(call.name) or ToolKind(call.name, None, is_custom=False)
            make = CustomCallItem if kind.is_custom else CallItem
            yield from self._open(make(self._request_id, len(self._values), call, kind))
        assert isinstance(self.open_item, CallItem), "arguments follow their call"
        yield from self.open_item.delta(call.arguments)

    def _open(self, item: OutputItem) -> Iterator[Event]:
        self.open_item = item
        yield from item.begin()

    def _close(self, status: str) -> Iterator[Event]:
        if self.open_item is not None:
            yield from self.open_item.end(status)
            self._values.append(self.open_item.value(status))
            self.open_item = None

    def _take_logprobs(self) -> list[dict[str, Any]]:
        positions, self._logprobs = self._logprobs, []
        return chat_logprobs(positions, by_id=False)["content"] if positions else []


def _brief(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Log-probabilities as events have them: without bytes."""
    return [
        _without_bytes(entry) | {"top_logprobs": [_without_bytes(other) for other in entry["top_logprobs"]]}
        for entry in logprobs
    ]


def _without_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "bytes"}
