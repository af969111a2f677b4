"""Merges a `Generate` call's responses into one."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.v1 import tokenizer_pb2
from shared.errors import RequestTooLargeError

# The largest message that gRPC clients accept by default.
MAX_ANSWER_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class _ChoiceParts:
    message: tokenizer_pb2.CompletedChoice
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)


class WholeAnswer:
    """Takes a call's responses and merges them."""

    def __init__(self, *, max_bytes: int | None = MAX_ANSWER_BYTES) -> None:
        """None sets no limit."""
        self._max_bytes = max_bytes
        self._prompts: list[tokenizer_pb2.CompletedPrompt] = []
        self._choices: dict[tuple[int, int], _ChoiceParts] = {}
        self._answer = tokenizer_pb2.CompleteResponse()
        self._num_bytes = 0

    async def write(self, response: tokenizer_pb2.GenerateResponse) -> None:
        """Take the next response.

        Raises:
            RequestTooLargeError: all are too large for one message.
        """
        self._num_bytes += response.ByteSize()
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            raise RequestTooLargeError(
                f"the answer exceeds {self._max_bytes} bytes: use Generate to stream it", limit=self._max_bytes
            )
        if response.HasField("accepted"):
            self._prompts.append(tokenizer_pb2.CompletedPrompt(accepted=response.accepted))
            return
        self._prompts[response.prompt].prompt_logprobs.extend(response.prompt_logprobs)
        self._add_to_choice(response)
        if response.HasField("usage"):
            self._answer.usage.CopyFrom(response.usage)

    def message(self) -> tokenizer_pb2.CompleteResponse:
        """The merged answer; called once, after the last response."""
        self._answer.prompts.extend(self._prompts)
        for _, parts in sorted(self._choices.items()):
            parts.message.text = "".join(parts.texts)
            parts.message.reasoning = "".join(parts.reasoning)
            for call, arguments in zip(parts.message.tool_calls, parts.arguments, strict=True):
                call.arguments = "".join(arguments)
            self._answer.choices.append(parts.message)
        return self._answer

    def _add_to_choice(self, response: tokenizer_pb2.GenerateResponse) -> None:
        place = response.prompt, response.choice
        parts = self._choices.get(place)
        if parts is None:
            message = tokenizer_pb2.CompletedChoice(prompt=response.prompt, choice=response.choice)
            parts = self._choices[place] = _ChoiceParts(message)
        parts.texts.append(response.text)
        parts.reasoning.append(response.reasoning)
        parts.message.token_ids.extend(response.token_ids)
        parts.message.logprobs.extend(response.logprobs)
        for delta in response.tool_calls:
            if delta.index == len(parts.arguments):
                parts.message.tool_calls.add(id=delta.id, name=delta.name)
                parts.arguments.append([])
            parts.arguments[delta.index].append(delta.arguments)
        if response.HasField("finish"):
            parts.message.finish.CopyFrom(response.finish)
