"""Turns a complete answer into one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from typing_extensions import override

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.answer.whole_answer import WholeAnswer
from services.tokenizer.http.fields.custom_input import CustomInput
from services.tokenizer.http.openai.logprob_values import CompletionLogprobs, chat_logprobs, prompt_logprobs
from services.tokenizer.http.streams.answer_facts import AnswerFacts, finish_reason, stop_reason, usage_value


class AnswerObject(Protocol):
    """A whole answer of a route; it takes the call's responses."""

    async def write(self, response: tokenizer_pb2.GenerateResponse) -> None:
        """Take the next response."""

    def value(self) -> dict[str, Any]:
        """The answer; called once, after the last response."""


class MergedAnswer(AnswerObject):
    """An answer that is made of all responses together."""

    def __init__(
        self, facts: AnswerFacts, make: Callable[[tokenizer_pb2.CompleteResponse, AnswerFacts], dict[str, Any]]
    ) -> None:
        self._facts = facts
        self._make = make
        self._answer = WholeAnswer(max_bytes=None)

    @override
    async def write(self, response: tokenizer_pb2.GenerateResponse) -> None:
        if response.HasField("accepted"):
            self._facts.accept(response.accepted)
        await self._answer.write(response)

    @override
    def value(self) -> dict[str, Any]:
        return self._make(self._answer.message(), self._facts)


def chat_answer(answer: tokenizer_pb2.CompleteResponse, facts: AnswerFacts) -> dict[str, Any]:
    """The answer to a chat."""
    value = _answer(answer, facts, "chat.completion", [_chat_choice(choice, facts) for choice in answer.choices])
    if facts.options.has_prompt_logprobs:
        value["prompt_logprobs"] = prompt_logprobs(answer.prompts[0].prompt_logprobs)
    if facts.options.has_token_ids:
        value["prompt_token_ids"] = list(facts.prompt(0).token_ids)
    return value


def completion_answer(answer: tokenizer_pb2.CompleteResponse, facts: AnswerFacts) -> dict[str, Any]:
    """The answer to a completion's prompts."""
    choices = [
        _completion_choice(choice, answer.prompts[choice.prompt].prompt_logprobs, facts) for choice in answer.choices
    ]
    return _answer(answer, facts, "text_completion", choices)


def _answer(
    answer: tokenizer_pb2.CompleteResponse, facts: AnswerFacts, kind: str, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        **facts.head(kind),
        "choices": choices,
        "usage": usage_value(answer.usage),
        **facts.closing(choice.finish for choice in answer.choices),
    }


def _chat_choice(choice: tokenizer_pb2.CompletedChoice, facts: AnswerFacts) -> dict[str, Any]:
    calls = [_call(call, facts.options.custom_tools) for call in choice.tool_calls]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not choice.text else choice.text,
        "refusal": None,
    }
    if choice.reasoning and facts.options.has_reasoning:
        message |= {"reasoning": choice.reasoning, "reasoning_content": choice.reasoning}
    if calls:
        message["tool_calls"] = calls
    logprobs = chat_logprobs(choice.logprobs, by_id=facts.options.names_tokens_by_id)
    value = {
        "index": facts.index(choice.prompt, choice.choice),
        "message": message,
        "logprobs": logprobs if facts.options.has_logprobs else None,
        **_end(choice),
    }
    if facts.options.has_token_ids:
        value["token_ids"] = list(choice.token_ids)
    return value


def _completion_choice(
    choice: tokenizer_pb2.CompletedChoice, of_prompt: Sequence[common_pb2.PositionLogprobs], facts: AnswerFacts
) -> dict[str, Any]:
    options, prompt = facts.options, facts.prompt(choice.prompt)
    logprobs = None
    if options.has_logprobs:
        makes_prompt = options.has_prompt_in_logprobs
        positions = [*of_prompt, *choice.logprobs] if makes_prompt else choice.logprobs
        logprobs = CompletionLogprobs(by_id=options.names_tokens_by_id).values(
            positions, first_text=prompt.first_text if makes_prompt else None
        )
    value = {
        "index": facts.index(choice.prompt, choice.choice),
        "text": choice.text,
        "logprobs": logprobs,
        **_end(choice),
    }
    if options.has_prompt_logprobs:
        value["prompt_logprobs"] = prompt_logprobs(of_prompt)
    if options.has_token_ids:
        value |= {"token_ids": list(choice.token_ids), "prompt_token_ids": list(prompt.token_ids)}
    return value


def _end(choice: tokenizer_pb2.CompletedChoice) -> dict[str, Any]:
    has_calls = bool(choice.tool_calls)
    return {
        "finish_reason": finish_reason(choice.finish, has_calls=has_calls),
        "stop_reason": stop_reason(choice.finish),
    }


def _call(call: tokenizer_pb2.ToolCall, custom_tools: Sequence[str]) -> dict[str, Any]:
    if call.name in custom_tools:
        text = CustomInput().push(call.arguments)
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
