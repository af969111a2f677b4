"""Writes responses: as a stream of events, or as one JSON object."""

from __future__ import annotations

import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from typing_extensions import override

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.openai.whole_answers import AnswerObject
from services.tokenizer.http.openai_responses.output import Event, MessageItem, Output
from services.tokenizer.http.openai_responses.request import ResponseOptions
from services.tokenizer.http.refusals import HttpError
from services.tokenizer.http.streams.answer_facts import AnswerFacts
from services.tokenizer.http.streams.pieces import AnswerEvents

_encode = msgspec.json.Encoder().encode
_IN_PROGRESS = "in_progress"
_DELTA = "response.output_text.delta"


class ResponseObject(AnswerObject):
    """One response, as far as it has come."""

    def __init__(self, facts: AnswerFacts) -> None:
        assert isinstance(facts.options, ResponseOptions), "the route has read the request"
        self._facts = facts
        self._options = facts.options
        self.output = Output(facts.id.removeprefix("resp_"), facts.options)
        self._finish: tokenizer_pb2.Finish | None = None
        self._usage = common_pb2.Usage()

    @override
    async def write(self, response: tokenizer_pb2.GenerateResponse) -> None:
        for _ in self.take(response):
            pass

    @override
    def value(self) -> dict[str, Any]:
        for _ in self.end():
            pass
        return self.object(self.status)

    def take(self, response: tokenizer_pb2.GenerateResponse) -> Iterable[Event]:
        """Take the next response of the call; returns its events."""
        if response.HasField("accepted"):
            self._facts.accept(response.accepted)
            return ()
        if response.HasField("finish"):
            self._finish = response.finish
        if response.HasField("usage"):
            self._usage = response.usage
        return self.output.take(response)

    def end(self) -> Iterable[Event]:
        """The call has ended; returns the last events of its items."""
        # A probe has none.
        return () if self._finish is None else self.output.end(is_cut=self.status == "incomplete")

    @property
    def status(self) -> str:
        """The status after the end."""
        is_cut = self._finish is not None and self._finish.reason == common_pb2.FINISH_REASON_MAX_TOKENS
        return "incomplete" if is_cut else "completed"

    def object(self, status: str, error: HttpError | None = None) -> dict[str, Any]:
        """The response."""
        is_over = status != _IN_PROGRESS
        finishes = [] if self._finish is None else [self._finish]
        return {
            "id": self._facts.id,
            "object": "response",
            "created_at": self._facts.created,
            "model": self._facts.model,
            "status": status,
            "error": None if error is None else {"code": _error_code(error), "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self.output.values() if is_over else [],
            "usage": usage_value(self._usage) if is_over and error is None else None,
            "completed_at": int(time.time()) if status == "completed" else None,
            **self._options.echoed,
            **(self._facts.closing(finishes) if is_over else {}),
        }


class ResponseEvents(AnswerEvents):
    """Makes the events of one stream. Invariant: `_number` is the next event's `sequence_number`."""

    def __init__(self, facts: AnswerFacts) -> None:
        self._response = ResponseObject(facts)
        self._number = 0
        # The item whose deltas have the prepared beginning.
        self._prepared_item: MessageItem | None = None
        self._before = b""

    @override
    def make(self, response: tokenizer_pb2.GenerateResponse) -> bytes:
        item = self._response.output.open_item
        if isinstance(item, MessageItem) and response.text and _has_only_text(response):
            return self._text_delta(item, response.text)
        opening = self._opening() if response.HasField("accepted") else b""
        return opening + self._events(self._response.take(response))

    @override
    def end(self) -> bytes:
        opening = b"" if self._number else self._opening()
        events = self._events(self._response.end())
        return opening + events + self._about_response(self._response.status)

    @override
    def failure(self, error: HttpError) -> bytes:
        told: Event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return self._event(told) + self._about_response("failed", error)

    def _opening(self) -> bytes:
        return self._about_response(_IN_PROGRESS, kind="created") + self._about_response(_IN_PROGRESS)

    def _about_response(self, status: str, error: HttpError | None = None, *, kind: str = "") -> bytes:
        return self._event({"type": f"response.{kind or status}", "response": self._response.object(status, error)})

    def _text_delta(self, item: MessageItem, text: str) -> bytes:
        """The event of text alone: the hot path, which every token passes."""
        if item is not self._prepared_item:
            self._prepared_item = item
            head = {"type": _DELTA, "item_id": item.id, "output_index": item.index, "content_index": 0, "logprobs": []}
            self._before = b"event: " + _DELTA.encode() + b"\ndata: " + _encode(head)[:-1] + b',"delta":'
        item.add(text)
        number = self._number
        self._number = number + 1
        return b'%b%b,"sequence_number":%d}\n\n' % (self._before, _encode(text), number)

    def _events(self, events: Iterable[Event]) -> bytes:
        return b"".join(self._event(event) for event in events)

    def _event(self, event: Event) -> bytes:
        data = _encode({**event, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)


def usage_value(usage: common_pb2.Usage) -> dict[str, Any]:
    """`usage`."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        # Nothing is charged for what is written to the cache.
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _has_only_text(response: tokenizer_pb2.GenerateResponse) -> bool:
    return not (response.reasoning or response.HasField("finish") or response.tool_calls or response.logprobs)


def _error_code(error: HttpError) -> str:
    """The nearest of OpenAI's codes, which are few; the event `error` has our own."""
    if error.status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_prompt"
