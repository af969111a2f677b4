"""Turns an answer's responses into the events of Anthropic's Messages, and these into one message.

A whole answer is what its events add up to, so that both forms say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pydantic_core
from typing_extensions import override

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.anthropic.errors import error_value
from services.tokenizer.http.fields.thinking_signatures import make_signature
from services.tokenizer.http.openai.whole_answers import AnswerObject
from services.tokenizer.http.refusals import HttpError
from services.tokenizer.http.streams.answer_facts import AnswerFacts
from services.tokenizer.http.streams.pieces import AnswerEvents

Event = dict[str, Any]

_encode = msgspec.json.Encoder().encode
_PLACEHOLDER = "\0"
_ENCODED_PLACEHOLDER = _encode(_PLACEHOLDER)


def event_bytes(event: Event) -> bytes:
    """A server-sent event, which has its type twice."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))


PING = event_bytes({"type": "ping"})
"""What a stream has after a silence."""


class MessageCourse:
    """Makes the events of one answer: blocks of reasoning, text and calls, one after another.

    Invariant: `_open` is the type of the block that `_index` counts, of which more may come, or None.
    """

    def __init__(self, facts: AnswerFacts) -> None:
        self._facts = facts
        self._open: str | None = None
        self._index = -1
        self._has_calls = False
        self._max_tokens = 0
        # Reasoning of the open block that is not shown.
        self._hidden: list[str] = []

    @property
    def is_in_text(self) -> bool:
        """Whether a block of text is open."""
        return self._open == "text"

    def events(self, response: tokenizer_pb2.GenerateResponse) -> Iterator[Event]:
        """The events of the next response."""
        if response.HasField("accepted"):
            self._facts.accept(response.accepted)
            self._max_tokens = response.accepted.max_tokens
            yield {"type": "message_start", "message": self._message()}
            return
        if response.reasoning:
            yield from self._reason(response.reasoning)
        if response.text:
            if not self.is_in_text:
                yield from self._begin({"type": "text", "text": ""})
            yield self.text_delta(response.text)
        for call in response.tool_calls:
            yield from self._call(call)
        if response.HasField("finish"):
            yield from self._end()
            yield self._closing(response.finish)
            yield {"type": "message_stop"}

    def text_delta(self, text: str) -> Event:
        """More text of the open block."""
        return self._delta({"type": "text_delta", "text": text})

    def _reason(self, text: str) -> Iterator[Event]:
        if self._open != "thinking":
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if self._facts.options.hides_reasoning:
            self._hidden.append(text)
        else:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _call(self, call: tokenizer_pb2.ToolCallDelta) -> Iterator[Event]:
        if call.id:
            self._has_calls = True
            yield from self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._end()
        self._open, self._index = block["type"], self._index + 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _end(self) -> Iterator[Event]:
        if self._open == "thinking":
            signature, self._hidden = make_signature("".join(self._hidden)), []
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _message(self) -> dict[str, Any]:
        # What is cached is known with the last event.
        usage = common_pb2.Usage(num_prompt_tokens=self._facts.num_prompt_tokens)
        return {
            "id": self._facts.id,
            "type": "message",
            "role": "assistant",
            "model": self._facts.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**usage_of(usage), "service_tier": "standard"},
        }

    def _closing(self, finish: tokenizer_pb2.Finish) -> Event:
        stop_sequence = finish.stop_string if finish.HasField("stop_string") else None
        return {
            "type": "message_delta",
            "delta": {"stop_reason": self._stop_reason(finish), "stop_sequence": stop_sequence},
            "usage": usage_of(finish.usage),
        }

    def _stop_reason(self, finish: tokenizer_pb2.Finish) -> str:
        if finish.reason == common_pb2.FINISH_REASON_MAX_TOKENS:
            had_room = self._max_tokens == self._facts.options.max_tokens
            return "max_tokens" if had_room else "model_context_window_exceeded"
        if finish.HasField("stop_string"):
            return "stop_sequence"
        return "tool_use" if self._has_calls else "end_turn"


class MessageEvents(AnswerEvents):
    """Makes the events of one stream."""

    def __init__(self, facts: AnswerFacts) -> None:
        self._facts = facts
        self._course = MessageCourse(facts)
        # What is before and after the text in a delta of the open block of text.
        self._head: tuple[bytes, bytes] | None = None

    @override
    def make(self, response: tokenizer_pb2.GenerateResponse) -> bytes:
        has_only_text = not (response.reasoning or response.HasField("finish") or response.tool_calls)
        if has_only_text and response.text and self._course.is_in_text:
            # The hot path: every token passes here.
            before, after = self._head or self._prepare()
            return before + _encode(response.text) + after
        self._head = None
        return b"".join(map(event_bytes, self._course.events(response)))

    @override
    def end(self) -> bytes:
        return b""

    @override
    def failure(self, error: HttpError) -> bytes:
        return event_bytes(error_value(error, self._facts.id.removeprefix(ID_PREFIX)))

    def _prepare(self) -> tuple[bytes, bytes]:
        before, _, after = event_bytes(self._course.text_delta(_PLACEHOLDER)).partition(_ENCODED_PLACEHOLDER)
        self._head = before, after
        return self._head


class MessageAnswer(AnswerObject):
    """Adds up the events of an answer."""

    def __init__(self, facts: AnswerFacts) -> None:
        self._course = MessageCourse(facts)
        self._message: dict[str, Any] = {}
        # The pieces of the open block: its text, reasoning or arguments.
        self._pieces: list[str] = []

    @override
    async def write(self, response: tokenizer_pb2.GenerateResponse) -> None:
        for event in self._course.events(response):
            self._add(event)

    @override
    def value(self) -> dict[str, Any]:
        return self._message

    def _add(self, event: Event) -> None:
        match event["type"]:
            case "message_start":
                self._message = event["message"]
            case "content_block_start":
                self._message["content"].append(event["content_block"])
            case "content_block_delta":
                self._add_delta(event["delta"])
            case "content_block_stop":
                self._end_block(self._message["content"][-1])
            case "message_delta":
                self._message |= event["delta"]
                self._message["usage"] |= event["usage"]

    def _add_delta(self, delta: dict[str, Any]) -> None:
        match delta["type"]:
            case "text_delta":
                self._pieces.append(delta["text"])
            case "thinking_delta":
                self._pieces.append(delta["thinking"])
            case "input_json_delta":
                self._pieces.append(delta["partial_json"])
            case "signature_delta":
                self._message["content"][-1]["signature"] = delta["signature"]

    def _end_block(self, block: dict[str, Any]) -> None:
        text, self._pieces = "".join(self._pieces), []
        if block["type"] == "tool_use":
            block["input"] = _input_of(text)
        else:
            block[block["type"]] = text


ID_PREFIX = "msg_"
"""What a message's id has before the cell's."""


def usage_of(usage: common_pb2.Usage) -> dict[str, Any]:
    """`usage`: what was found in the cache is not counted with the input."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
    }


def _input_of(arguments: str) -> Any:
    """A call's input; of arguments that were cut off, what is there, as Anthropic's libraries read it."""
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
