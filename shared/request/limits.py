"""The limits of a prompt and its completion, checked by the tokenizer and again by the scheduler.

Pure. `shared.request.sampling_params` has the ranges of sampling parameters.
"""

from __future__ import annotations

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

MAX_CHOICES = 8
# Maximum draft tokens per sequence and step.
MAX_DRAFT_TOKENS = 8
# Batch sizes for which workers capture graphs of decode steps, and to which coupled ranks pad: ATOM's list.
GRAPH_BATCH_SIZES = (1, 2, 4, 8, *range(16, 513, 16))

# Inside a cell, token ids are always little-endian int32.
TOKEN_DTYPE = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of the served model and its cell."""

    context_length: int
    """Tokens of one sequence, at most."""
    logits_width: int
    """Token ids are below this."""
    num_pool_tokens: int
    """Tokens in the KV pool, over all sequences."""


def room_left(num_prompt_tokens: int, limits: ModelLimits) -> int:
    """The most completion tokens that a prompt leaves room for; below 1 if it leaves none."""
    return min(limits.context_length, limits.num_pool_tokens) - num_prompt_tokens


def check_prompt(token_ids: npt.NDArray[np.integer], limits: ModelLimits, *, field: str = "prompt") -> None:
    """Reject a prompt that is empty, too long for the context, or contains an unknown id.

    Args:
        token_ids: [num_tokens], any integer dtype.

    Raises:
        InvalidRequestError: it is empty, or an id is out of range (with the index of the first one).
        PromptTooLongError: it leaves no room for a completion token.
    """
    check_prompt_length(token_ids.size, limits, field=field)
    check_token_ids(token_ids, limits.logits_width, field=field)


def check_prompt_length(num_tokens: int, limits: ModelLimits, *, field: str = "prompt") -> None:
    """Reject a prompt by its length alone.

    Raises:
        InvalidRequestError: it is empty.
        PromptTooLongError: it leaves no room for a completion token.
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
    """Reject token ids outside the vocabulary.

    Raises:
        InvalidRequestError: an id is negative or not below `logits_width`; with the index of the first one.
    """
    # Seen as unsigned numbers, negative ids are too large as well.
    if not token_ids.size or token_ids.view(f"u{token_ids.itemsize}").max() < logits_width:
        return
    index = int(((token_ids < 0) | (token_ids >= logits_width)).argmax())
    raise InvalidRequestError.from_violations([Violation(*out_of_vocabulary(f"{field}[{index}]", logits_width))])


def check_fit(num_prompt_tokens: int, max_tokens: int, limits: ModelLimits) -> None:
    """Reject a prompt and completion that can never fit.

    Raises:
        ContextExceededError: they exceed the model's context.
        KvCapacityExceededError: they exceed the cell's KV pool.
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


def check_task(*, wants_vector: bool, embeds: bool) -> None:
    """Reject what the model is not served for.

    Args:
        wants_vector: Whether the prompt's vector is wanted, instead of a completion.
        embeds: Whether the model is served for vectors, instead of text.

    Raises:
        InvalidRequestError: it is served for the other.
    """
    if wants_vector is not embeds:
        what = (
            "text and scores, not vectors: --task embed serves these" if wants_vector else "vectors, not text or scores"
        )
        violation = Violation("model", "OUT_OF_RANGE", f"the model is served for {what}")
        raise InvalidRequestError.from_violations([violation])


def out_of_vocabulary(field: str, logits_width: int) -> tuple[str, str, str]:
    """The field, reason and description of a violation: a token id is outside the vocabulary."""
    return field, "TOKEN_ID_OUT_OF_RANGE", f"token ids must be below {logits_width}"
