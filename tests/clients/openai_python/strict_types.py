"""Validates JSON strictly against the types of OpenAI's library, which itself takes anything."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from openai.types import Completion, CompletionChoice, Model
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    chat_completion,
    chat_completion_chunk,
)
from openai.types.responses import Response
from pydantic import BaseModel, ValidationError

_EXTRA: dict[type[BaseModel], set[str]] = {
    ChatCompletion: {"lockstep", "prompt_logprobs", "prompt_token_ids"},
    chat_completion.Choice: {"stop_reason", "token_ids"},
    ChatCompletionMessage: {"reasoning", "reasoning_content"},
    ChatCompletionChunk: {"lockstep"},
    chat_completion_chunk.Choice: {"stop_reason", "token_ids", "prompt_token_ids"},
    chat_completion_chunk.ChoiceDelta: {"reasoning", "reasoning_content"},
    Completion: {"lockstep"},
    CompletionChoice: {"stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"},
    Response: {"lockstep", "system_fingerprint"},
    Model: {"root", "parent", "max_model_len", "implementation"},
}
"""Fields that OpenAI's types do not have: vLLM's, and `lockstep`. There are no others."""


def problems_of(kind: type[BaseModel], value: Any) -> list[str]:
    """What is wrong with a JSON value of this type; empty if nothing is."""
    try:
        instance = kind.model_validate(_without_nulls(value) if kind is Completion else value, strict=True)
    except ValidationError as error:
        return [str(error)]
    return [f"{type(model).__name__} has {name}" for model in _models_in(instance) for name in _unknown(model)]


def _without_nulls(completion: Any) -> Any:
    """A completion without the nulls that are right, though the library's types do not say so.

    OpenAI's API says null until a choice of a stream has ended, and for the prompt's first token, which has no
    log-probability.
    """
    completion = deepcopy(completion)
    for choice in completion["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        logprobs = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
        for name, neutral in (("token_logprobs", 0.0), ("top_logprobs", {})):
            if logprobs[name] and logprobs[name][0] is None:
                logprobs[name][0] = neutral
    return completion


def _unknown(model: BaseModel) -> set[str]:
    return set(model.model_extra or ()) - _EXTRA.get(type(model), set())


def _models_in(value: Any) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from _models_in(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _models_in(item)
