"""What every answer of the HTTP API says beside its text: ids, finish reasons, usage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.http.fields.api_request import AnswerOptions

_LENGTH = common_pb2.FINISH_REASON_MAX_TOKENS


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What is known of a prompt before it is submitted, if it was asked for."""

    token_ids: Sequence[int] = ()
    first_text: str = ""
    """The text of its first token."""


@dataclass(slots=True)
class AnswerFacts:
    """What all pieces of one answer share."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str
    system_fingerprint: str
    options: AnswerOptions
    seed: int
    num_choices: int
    """Choices of each prompt."""
    prompts: Sequence[PromptFacts] = ()
    """Empty unless asked for."""
    not_enforced: list[str] = field(default_factory=list)
    """What of the schema is not enforced, as JSON pointers."""
    unread: dict[str, None] = field(default_factory=dict)
    """The fields that only set what the chat template never reads."""
    num_prompt_tokens: int = 0

    def head(self, kind: str) -> dict[str, Any]:
        """The first fields of every JSON object; `kind` is its `object`."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def accept(self, accepted: tokenizer_pb2.Accepted) -> None:
        """Take what the service says of the next prompt."""
        self.num_prompt_tokens += accepted.num_prompt_tokens
        for name in accepted.unread_variables:
            self.unread |= dict.fromkeys(self.options.variable_fields.get(name, ()))
        if not self.not_enforced:
            self.not_enforced.extend(f"{self.options.schema_field}{place}" for place in accepted.not_enforced)

    def index(self, prompt: int, choice: int) -> int:
        """The place of a choice among those of all prompts."""
        return prompt * self.num_choices + choice

    def prompt(self, index: int) -> PromptFacts:
        """What is known of a prompt."""
        return self.prompts[index] if self.prompts else PromptFacts()

    def closing(self, finishes: Iterable[tokenizer_pb2.Finish]) -> dict[str, Any]:
        """The fields of the last JSON object: how the answer came about."""
        recoveries = [finish.recovery for finish in finishes if finish.HasField("recovery")]
        return {
            "system_fingerprint": self.system_fingerprint,
            "lockstep": {
                "seed": self.seed,
                "resume_count": sum(recovery.resume_count for recovery in recoveries),
                "resume_exact": all(recovery.resume_exact for recovery in recoveries),
            },
        }


def finish_reason(finish: tokenizer_pb2.Finish, *, has_calls: bool) -> str:
    """OpenAI's name for how a choice ended."""
    if finish.reason == _LENGTH:
        return "length"
    return "tool_calls" if has_calls else "stop"


def stop_reason(finish: tokenizer_pb2.Finish) -> str | int | None:
    """vLLM's: the stop string or stop token that ended a choice; None for all other ends."""
    if finish.HasField("stop_string"):
        return finish.stop_string
    if finish.reason == common_pb2.FINISH_REASON_STOP_TOKEN and finish.HasField("stop_token_id"):
        return finish.stop_token_id
    return None


def usage_value(usage: common_pb2.Usage) -> dict[str, Any]:
    """`usage`."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }
