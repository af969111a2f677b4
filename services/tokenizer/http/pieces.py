"""Turns an answer's responses into the pieces of a stream."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.answer_facts import AnswerFacts, finish_reason, stop_reason, usage_value
from services.tokenizer.http.logprob_values import CompletionLogprobs, chat_logprobs

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
_PLACEHOLDER = "\0"
_ENCODED_PLACEHOLDER = _encode(_PLACEHOLDER)


def event(value: object) -> bytes:
    """A server-sent event with a JSON value."""
    return b"data: " + _encode(value) + b"\n\n"


class ChoiceForm(Protocol):
    """What a route's stream says of a choice."""

    kind: str
    """The pieces' `object`."""

    def text(self, text: str) -> dict[str, Any]:
        """The fields of a choice that has only news of its text."""

    def opening(self) -> dict[str, Any] | None:
        """The fields of a choice's first piece, if that comes before any text."""

    def fields(self, response: tokenizer_pb2.GenerateResponse) -> dict[str, Any]:
        """The fields of a choice with any news."""


class Pieces:
    """Makes the pieces of one stream."""

    def __init__(self, facts: AnswerFacts, kind: str) -> None:
        self._facts = facts
        self._kind = kind
        self._forms: dict[int, ChoiceForm] = {}
        self._heads: dict[int, tuple[bytes, bytes]] = {}
        self._finishes: list[tokenizer_pb2.Finish] = []
        self._num_tokens = 0
        self._usage: common_pb2.Usage | None = None
        options = facts.options
        # A piece with text alone is the prepared beginning, the text and the prepared end.
        self._may_be_prepared = not (options.has_token_ids or options.has_running_usage or options.has_logprobs)

    def make(self, response: tokenizer_pb2.GenerateResponse) -> bytes:
        """The events of a response; empty if it has no news for the client."""
        if response.HasField("accepted"):
            self._facts.accept(response.accepted)
            return b""
        index = self._facts.index(response.prompt, response.choice)
        self._num_tokens += len(response.token_ids)
        opening = b""
        if index not in self._forms:
            form = self._forms[index] = self._make_form(response.prompt)
            first = form.opening()
            if first is not None:
                opening = event(self._piece({"index": index, **first}))
        is_plain = not (response.reasoning or response.tool_calls or response.HasField("finish"))
        if self._may_be_prepared and is_plain:
            return opening + self._prepared(index, response.text) if response.text else opening
        return opening + self._any_piece(index, response)

    def end(self) -> bytes:
        """The events after the last response."""
        if not self._facts.options.has_usage or self._usage is None:
            return DONE
        usage = self._piece(None) | {"usage": usage_value(self._usage)} | self._facts.closing(self._finishes)
        return event(usage) + DONE

    def _make_form(self, prompt: int) -> ChoiceForm:
        if self._kind == ChatChoiceForm.kind:
            return ChatChoiceForm(self._facts, prompt)
        return CompletionChoiceForm(self._facts, prompt)

    def _prepared(self, index: int, text: str) -> bytes:
        head = self._heads.get(index)
        if head is None:
            piece = self._piece({"index": index, **self._forms[index].text(_PLACEHOLDER)})
            before, _, after = event(piece).partition(_ENCODED_PLACEHOLDER)
            head = self._heads[index] = before, after
        return head[0] + _encode(text) + head[1]

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


class ChatChoiceForm:
    """A choice of a chat."""

    kind = "chat.completion.chunk"

    def __init__(self, facts: AnswerFacts, prompt: int) -> None:
        self._facts = facts
        self._prompt = prompt
        self._has_calls = False

    def opening(self) -> dict[str, Any] | None:
        """See `ChoiceForm`."""
        first = self._choice({"role": "assistant", "content": ""})
        if self._facts.options.has_token_ids:
            first["prompt_token_ids"] = list(self._facts.prompt(self._prompt).token_ids)
        return first

    def text(self, text: str) -> dict[str, Any]:
        """See `ChoiceForm`."""
        return self._choice({"content": text})

    def fields(self, response: tokenizer_pb2.GenerateResponse) -> dict[str, Any]:
        """See `ChoiceForm`."""
        options = self._facts.options
        delta: dict[str, Any] = {}
        if response.reasoning and options.has_reasoning:
            delta |= {"reasoning": response.reasoning, "reasoning_content": response.reasoning}
        if response.text:
            delta["content"] = response.text
        if response.tool_calls:
            self._has_calls = True
            delta["tool_calls"] = [_call_delta(call) for call in response.tool_calls]
        choice = self._choice(delta)
        if response.logprobs:
            choice["logprobs"] = chat_logprobs(response.logprobs, by_id=options.names_tokens_by_id)
        if options.has_token_ids:
            choice["token_ids"] = list(response.token_ids)
        if response.HasField("finish"):
            choice["finish_reason"] = finish_reason(response.finish, has_calls=self._has_calls)
            choice["stop_reason"] = stop_reason(response.finish)
        has_news = delta or response.HasField("finish") or response.logprobs or options.has_token_ids
        return choice if has_news else {}

    def _choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"delta": delta, "logprobs": None, "finish_reason": None}


class CompletionChoiceForm:
    """A choice of a completion."""

    kind = "text_completion"

    def __init__(self, facts: AnswerFacts, prompt: int) -> None:
        self._facts = facts
        self._prompt = prompt
        self._is_first = True
        self._logprobs = CompletionLogprobs(by_id=facts.options.names_tokens_by_id)
        self._prompt_logprobs: list[common_pb2.PositionLogprobs] = []

    def opening(self) -> dict[str, Any] | None:
        """See `ChoiceForm`."""
        return None

    def text(self, text: str) -> dict[str, Any]:
        """See `ChoiceForm`."""
        return {"text": text, "logprobs": None, "finish_reason": None}

    def fields(self, response: tokenizer_pb2.GenerateResponse) -> dict[str, Any]:
        """See `ChoiceForm`."""
        options = self._facts.options
        choice = self.text(response.text)
        self._prompt_logprobs += response.prompt_logprobs
        has_tokens = bool(response.token_ids) or response.HasField("finish")
        if options.has_logprobs and has_tokens:
            choice["logprobs"] = self._next_logprobs(response)
        if options.has_token_ids:
            choice["token_ids"] = list(response.token_ids)
            if self._is_first:
                choice["prompt_token_ids"] = list(self._facts.prompt(self._prompt).token_ids)
                self._is_first = False
        if response.HasField("finish"):
            choice["finish_reason"] = finish_reason(response.finish, has_calls=False)
            choice["stop_reason"] = stop_reason(response.finish)
        return choice if response.text or has_tokens else {}

    def _next_logprobs(self, response: tokenizer_pb2.GenerateResponse) -> dict[str, Any]:
        first_text, of_prompt = None, self._prompt_logprobs
        if self._facts.options.has_prompt_in_logprobs and of_prompt is not None:
            first_text = self._facts.prompt(self._prompt).first_text if not self._has_begun else None
        self._has_begun, self._prompt_logprobs = True, []
        return self._logprobs.values([*of_prompt, *response.logprobs], first_text=first_text)

    _has_begun = False


def _call_delta(call: tokenizer_pb2.ToolCallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
