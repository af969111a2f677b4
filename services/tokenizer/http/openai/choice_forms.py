"""What the pieces of a stream say of one choice, by the route: see `ChoiceForm`."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.fields.custom_input import CustomInput
from services.tokenizer.http.openai.logprob_values import CompletionLogprobs, chat_logprobs
from services.tokenizer.http.streams.answer_facts import AnswerFacts, finish_reason, stop_reason
from services.tokenizer.http.streams.pieces import ChoiceForm


class ChatChoiceForm(ChoiceForm):
    """A choice of a chat."""

    def __init__(self, facts: AnswerFacts, prompt: int) -> None:
        self._facts = facts
        self._prompt = prompt
        self._has_calls = False
        # Inputs of the calls of custom tools, by the calls' indices.
        self._inputs: dict[int, CustomInput] = {}

    @override
    def opening(self) -> dict[str, Any] | None:
        first = self._choice({"role": "assistant", "content": ""})
        if self._facts.options.has_token_ids:
            first["prompt_token_ids"] = list(self._facts.prompt(self._prompt).token_ids)
        return first

    @override
    def text(self, text: str) -> dict[str, Any]:
        return self._choice({"content": text})

    @override
    def fields(self, response: tokenizer_pb2.GenerateResponse) -> dict[str, Any]:
        options = self._facts.options
        delta: dict[str, Any] = {}
        if response.reasoning and options.has_reasoning:
            delta |= {"reasoning": response.reasoning, "reasoning_content": response.reasoning}
        if response.text:
            delta["content"] = response.text
        if response.tool_calls:
            self._has_calls = True
            if calls := [value for call in response.tool_calls if (value := self._call(call))]:
                delta["tool_calls"] = calls
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

    def _call(self, call: tokenizer_pb2.ToolCallDelta) -> dict[str, Any]:
        """The news of a call; empty if there is none."""
        if call.id and call.name in self._facts.options.custom_tools:
            self._inputs[call.index] = CustomInput()
        custom = self._inputs.get(call.index)
        kind, argument = ("function", "arguments") if custom is None else ("custom", "input")
        text = call.arguments if custom is None else custom.push(call.arguments)
        if call.id:
            return {"index": call.index, "id": call.id, "type": kind, kind: {"name": call.name, argument: text}}
        return {"index": call.index, kind: {argument: text}} if text or custom is None else {}

    def _choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"delta": delta, "logprobs": None, "finish_reason": None}


class CompletionChoiceForm(ChoiceForm):
    """A choice of a completion."""

    def __init__(self, facts: AnswerFacts, prompt: int) -> None:
        self._facts = facts
        self._prompt = prompt
        self._logprobs = CompletionLogprobs(by_id=facts.options.names_tokens_by_id)
        # What the first piece has of the prompt; then empty.
        self._prompt_logprobs: list[common_pb2.PositionLogprobs] = []
        self._first_text = facts.prompt(prompt).first_text if facts.options.has_prompt_in_logprobs else None
        self._prompt_ids: list[int] | None = list(facts.prompt(prompt).token_ids)

    @override
    def opening(self) -> dict[str, Any] | None:
        return None

    @override
    def text(self, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": None, "finish_reason": None}

    @override
    def fields(self, response: tokenizer_pb2.GenerateResponse) -> dict[str, Any]:
        options = self._facts.options
        choice = self.text(response.text)
        self._prompt_logprobs += response.prompt_logprobs
        has_tokens = bool(response.token_ids) or response.HasField("finish")
        if options.has_logprobs and has_tokens:
            choice["logprobs"] = self._next_logprobs(response)
        if options.has_token_ids and has_tokens:
            choice["token_ids"] = list(response.token_ids)
            if self._prompt_ids is not None:
                choice["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        if response.HasField("finish"):
            choice["finish_reason"] = finish_reason(response.finish, has_calls=False)
            choice["stop_reason"] = stop_reason(response.finish)
        return choice if response.text or has_tokens else {}

    def _next_logprobs(self, response: tokenizer_pb2.GenerateResponse) -> dict[str, Any]:
        positions = [*self._prompt_logprobs, *response.logprobs]
        values = self._logprobs.values(positions, first_text=self._first_text)
        self._prompt_logprobs, self._first_text = [], None
        return values
