"""A request of the HTTP API, read: what the service is asked, and how the answer is to look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.refusals import FieldNaming


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the answer contains beside the text."""

    is_streamed: bool = False
    has_usage: bool = False
    """Whether a stream ends with the usage; a whole answer always has it."""
    has_running_usage: bool = False
    """Whether every piece of a stream has the usage so far."""
    has_token_ids: bool = False
    names_tokens_by_id: bool = False
    """Whether log-probabilities give `token_id:5` instead of the token's text."""
    has_reasoning: bool = True
    has_logprobs: bool = False
    has_prompt_in_logprobs: bool = False
    """Whether a completion's log-probabilities begin with the prompt's."""
    has_prompt_logprobs: bool = False
    schema_field: str = ""
    """The field with the JSON schema, of which a part may not be enforced."""
    variable_fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The fields that have set the chat template's variables, by their names."""
    hides_reasoning: bool = False
    """Whether an answer of Messages has its reasoning in the signature alone."""
    custom_tools: Sequence[str] = ()
    """The names of a chat's custom tools, whose calls have a text as their input."""
    max_tokens: int | None = None
    """What Messages ask for: an answer has fewer where the context has no room for them."""


@dataclass(slots=True)
class ApiRequest:
    """A request, ready for `GenerateCall`."""

    message: tokenizer_pb2.GenerateRequest
    options: AnswerOptions
    names: FieldNaming
    model: str | None
    """The model's name as the client gave it; None if it did not."""
    default_max_tokens: int | None = None
    """What `max_tokens` is at most if the message has none; None means all the room that is left."""
    timeout_s: float | None = None
    ignored: list[str] = field(default_factory=list)
    """Names of fields that have no effect."""
    is_probe: bool = False
    """Whether nothing is generated: the client asks only whether it would be."""
    log_facts: dict[str, str] = field(default_factory=dict)
    """Further fields of the log line, without a client's text."""

    @property
    def prompts(self) -> list[tokenizer_pb2.Prompt]:
        """Its prompts, one or several."""
        if self.message.WhichOneof("prompt") == "prompts":
            return list(self.message.prompts.prompts)
        kind = self.message.WhichOneof("prompt")
        prompt = tokenizer_pb2.Prompt()
        if kind == "chat":
            prompt.chat.CopyFrom(self.message.chat)
        elif kind == "tokens":
            prompt.tokens.CopyFrom(self.message.tokens)
        else:
            prompt.text = self.message.text
        return [prompt]
