"""What a request may ask for: one table of checks that the tokenizer makes first and the scheduler again.

Pure and transport-free. No value from a client reaches a worker unless it passed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import (
    ContextExceededError,
    InvalidRequestError,
    KvCapacityExceededError,
    PromptTooLongError,
    Violation,
)

MAX_STOP_TOKEN_IDS = 64
MAX_STOP_TOKEN_SEQUENCES = 8
MAX_STOP_TOKEN_SEQUENCE_LENGTH = 32
MAX_TEMPERATURE = 2.0
MAX_CACHE_SALT_BYTES = 64
DEFAULT_MAX_TOKENS = 4096

# What cells speak: token ids are little-endian int32, wherever they are.
TOKEN_DTYPE = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the served model and its cell allow."""

    context_length: int
    logits_width: int
    num_pool_tokens: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a sequence's tokens are drawn and when it ends; every parameter resolved.

    Units and ranges are those of `lockstep.v1.SamplingParams`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop_token_sequences: tuple[tuple[int, ...], ...] = ()


def default_max_tokens(num_prompt_tokens: int, limits: ModelLimits) -> int:
    """The completion tokens of a request that names no limit; below 1 when the prompt leaves no room."""
    room = min(limits.context_length, limits.num_pool_tokens) - num_prompt_tokens
    return min(DEFAULT_MAX_TOKENS, room)


def check_sampling(params: SamplingParams, limits: ModelLimits, *, prefix: str = "sampling.") -> None:
    """Refuse sampling parameters that are out of range.

    Raises:
        InvalidRequestError: naming every bad field, each behind `prefix`.
    """
    violations = [
        Violation(prefix + field, reason, description)
        for field, reason, description in _sampling_violations(params, limits.logits_width)
    ]
    if violations:
        raise InvalidRequestError.from_violations(violations)


def check_prompt(token_ids: npt.NDArray[np.integer], limits: ModelLimits, *, field: str = "prompt") -> None:
    """Refuse a prompt that is empty, too long for the context, or holds an id the model does not know.

    Args:
        token_ids: [num_tokens], any integer dtype.
        limits: The served model's.
        field: The request's field that a violation names.

    Raises:
        InvalidRequestError: it is empty, or an id is out of range (the first one's index is given).
        PromptTooLongError: no token could follow it.
    """
    check_prompt_length(token_ids.size, limits, field=field)
    check_token_ids(token_ids, limits.logits_width, field=field)


def check_prompt_length(num_tokens: int, limits: ModelLimits, *, field: str = "prompt") -> None:
    """Refuse a prompt by its length alone.

    Raises:
        InvalidRequestError: it is empty.
        PromptTooLongError: no token could follow it.
    """
    if num_tokens == 0:
        raise InvalidRequestError.from_violations([Violation(field, "PROMPT_EMPTY", "at least one token is needed")])
    if num_tokens >= limits.context_length:
        raise PromptTooLongError(
            f"the prompt has {num_tokens} tokens, the model's context is {limits.context_length}",
            limit=limits.context_length - 1,
            actual=num_tokens,
        )


def check_token_ids(token_ids: npt.NDArray[np.integer], logits_width: int, *, field: str) -> None:
    """Refuse token ids that the model does not know.

    Raises:
        InvalidRequestError: an id is negative or not below `logits_width`; the first one's index is given.
    """
    # As unsigned numbers, negative ones are too large as well.
    if not token_ids.size or token_ids.view(f"u{token_ids.itemsize}").max() < logits_width:
        return
    index = int(((token_ids < 0) | (token_ids >= logits_width)).argmax())
    raise InvalidRequestError.from_violations([_out_of_vocabulary(f"{field}[{index}]", logits_width)])


def check_fit(num_prompt_tokens: int, max_tokens: int, limits: ModelLimits) -> None:
    """Refuse a request whose prompt and completion can never fit.

    Raises:
        ContextExceededError: they are longer than the model's context.
        KvCapacityExceededError: they are longer than the cell's KV pool.
    """
    total = num_prompt_tokens + max_tokens
    if total > limits.context_length:
        raise ContextExceededError(
            f"{num_prompt_tokens} prompt and {max_tokens} completion tokens exceed the model's context of "
            f"{limits.context_length}",
            limit=limits.context_length,
            actual=total,
        )
    if total > limits.num_pool_tokens:
        raise KvCapacityExceededError(
            f"{num_prompt_tokens} prompt and {max_tokens} completion tokens exceed the cell's KV pool of "
            f"{limits.num_pool_tokens} tokens",
            limit=limits.num_pool_tokens,
            actual=total,
        )


def _sampling_violations(params: SamplingParams, logits_width: int) -> Iterator[tuple[str, str, str]]:
    if params.max_tokens < 1:
        yield "max_tokens", "OUT_OF_RANGE", "must be at least 1"
    yield from _float_violations(
        "temperature",
        params.temperature,
        0.0 <= params.temperature <= MAX_TEMPERATURE,
        f"must be between 0 and {MAX_TEMPERATURE:g}",
    )
    yield from _float_violations("top_p", params.top_p, 0.0 < params.top_p <= 1.0, "must be above 0 and at most 1")
    if not 0 <= params.top_k <= logits_width:
        yield "top_k", "OUT_OF_RANGE", f"must be between 0 and {logits_width}"
    if not 0 <= params.seed < 2**64:
        yield "seed", "OUT_OF_RANGE", "must be an unsigned 64-bit number"
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield "stop_token_ids", "OUT_OF_RANGE", f"at most {MAX_STOP_TOKEN_IDS}"
    else:
        yield from _id_violations("stop_token_ids", params.stop_token_ids, logits_width)
    yield from _stop_sequence_violations(params.stop_token_sequences, logits_width)


def _stop_sequence_violations(
    sequences: tuple[tuple[int, ...], ...], logits_width: int
) -> Iterator[tuple[str, str, str]]:
    if len(sequences) > MAX_STOP_TOKEN_SEQUENCES:
        yield "stop_token_sequences", "OUT_OF_RANGE", f"at most {MAX_STOP_TOKEN_SEQUENCES}"
        return
    for number, ids in enumerate(sequences):
        field = f"stop_token_sequences[{number}]"
        if not 1 <= len(ids) <= MAX_STOP_TOKEN_SEQUENCE_LENGTH:
            yield field, "OUT_OF_RANGE", f"must have 1 to {MAX_STOP_TOKEN_SEQUENCE_LENGTH} token ids"
        else:
            yield from _id_violations(f"{field}.token_ids", ids, logits_width)


def _float_violations(field: str, value: float, in_range: bool, rule: str) -> Iterator[tuple[str, str, str]]:
    if not math.isfinite(value):
        yield field, "NOT_FINITE", "must be a finite number"
    elif not in_range:
        yield field, "OUT_OF_RANGE", rule


def _id_violations(field: str, ids: tuple[int, ...], logits_width: int) -> Iterator[tuple[str, str, str]]:
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < logits_width:
            violation = _out_of_vocabulary(f"{field}[{index}]", logits_width)
            yield violation.field, violation.reason, violation.description


def _out_of_vocabulary(field: str, logits_width: int) -> Violation:
    return Violation(field, "TOKEN_ID_OUT_OF_RANGE", f"token ids are below {logits_width}")
