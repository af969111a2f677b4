"""Turns an answer's responses into the pieces of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from typing_extensions import override

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.refusals import HttpError
from services.tokenizer.http.streams.answer_facts import AnswerFacts, usage_value

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_PLACEHOLDER = "\0"
_ENCODED_PLACEHOLDER = _encode(_PLACEHOLDER)


def event(value: object) -> bytes:
    """A server-sent event with a JSON value."""
    return b"data: " + _encode(value) + b"\n\n"


class AnswerEvents(Protocol):
    """What a route's stream says, as server-sent events."""

    def make(self, response: tokenizer_pb2.GenerateResponse) -> bytes:
        """The events of a response; empty if it has no news for the client."""

    def end(self) -> bytes:
        """The events after the last response."""

    def failure(self, error: HttpError) -> bytes:
        """The event of an error, which is the last one."""


class ChoiceForm(Protocol):
    """What a route's stream says of a choice."""

    def text(self, text: str) -> dict[str, Any]:
        """The fields of a choice that has only news of its text."""

    def opening(self) -> dict[str, Any] | None:
        """The fields of a choice's first piece, if that comes before any text."""

    def fields(self, response: tokenizer_pb2.GenerateResponse) -> dict[str, Any]:
        """The fields of a choice with any news."""


class Pieces(AnswerEvents):
    """Makes the pieces of one stream."""

    def __init__(self, facts: AnswerFacts, kind: str, make_form: Callable[[AnswerFacts, int], ChoiceForm]) -> None:
        """Make none yet.

        Args:
            facts: What they share.
            kind: Their `object`.
            make_form: Makes the form of a choice of a prompt.
        """
        self._facts = facts
        self._kind = kind
        self._make_form = make_form
        self._forms: dict[int, ChoiceForm] = {}
        self._heads: dict[int, tuple[bytes, bytes]] = {}
        self._finishes: list[tokenizer_pb2.Finish] = []
        self._num_tokens = 0
        self._usage: common_pb2.Usage | None = None
        options = facts.options
        # A piece with text alone is the prepared beginning, the text and the prepared end.
        self._may_be_prepared = not (options.has_token_ids or options.has_running_usage or options.has_logprobs)

    @override
    def make(self, response: tokenizer_pb2.GenerateResponse) -> bytes:
        index = self._facts.index(response.prompt, response.choice)
        text = response.text
        if text and index in self._heads and _has_only_text(response):
            # The hot path: every token passes here, and each look at a message costs as much as encoding its text.
            before, after = self._heads[index]
            return before + _encode(text) + after
        return self._make_any(index, response)

    def _make_any(self, index: int, response: tokenizer_pb2.GenerateResponse) -> bytes:
        if response.HasField("accepted"):
            self._facts.accept(response.accepted)
            return b""
        self._num_tokens += len(response.token_ids)
        opening = b""
        if index not in self._forms:
            form = self._forms[index] = self._make_form(self._facts, response.prompt)
            first = form.opening()
            if first is not None:
                opening = event(self._piece({"index": index, **first}))
        if self._may_be_prepared and _has_only_text(response):
            return opening + self._prepare(index, response.text) if response.text else opening
        return opening + self._any_piece(index, response)

    @override
    def end(self) -> bytes:
        if not self._facts.options.has_usage or self._usage is None:
            return DONE
        usage = self._piece(None) | {"usage": usage_value(self._usage)} | self._facts.closing(self._finishes)
        return event(usage) + DONE

    @override
    def failure(self, error: HttpError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def _prepare(self, index: int, text: str) -> bytes:
        """The first piece of a choice with text alone, as which further ones are made."""
        piece = self._piece({"index": index, **self._forms[index].text(_PLACEHOLDER)})
        before, _, after = event(piece).partition(_ENCODED_PLACEHOLDER)
        self._heads[index] = before, after
        return before + _encode(text) + after

    def _any_piece(self, index: int, response: tokenizer_pb2.GenerateResponse) -> bytes:
        fields = self._forms[index].fields(response)
        if not fields:
            return b""
        piece = self._piece({"index": index, **fields})
        if response.HasField("finish"):
            self._finishes.append(response.finish)
        if response.HasField("usage"):
            self._usage = response.usage
            if not self._facts.options.has_usage:
                piece |= self._facts.closing(self._finishes)
        return event(piece)

    def _piece(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        """A piece with one choice, or none."""
        piece = self._facts.head(self._kind) | {"choices": [] if choice is None else [choice]}
        if self._facts.options.has_running_usage:
            usage = common_pb2.Usage(
                num_prompt_tokens=self._facts.num_prompt_tokens, num_completion_tokens=self._num_tokens
            )
            piece["usage"] = usage_value(usage)
        elif self._facts.options.has_usage:
            piece["usage"] = None
        return piece


def _has_only_text(response: tokenizer_pb2.GenerateResponse) -> bool:
    return not (response.reasoning or response.HasField("finish") or response.tool_calls)
