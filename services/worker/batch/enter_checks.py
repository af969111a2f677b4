"""Checks on a sequence that enters the batch: it came over the wire."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shared.errors import InvalidRequestError, StepMismatchError
from shared.request.limits import ModelLimits
from shared.request.sampling_params import Pooling, check_sampling
from shared.step.columns import Int32Column
from shared.step.step import EnteringSequence


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits for every step of an epoch."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    context_length: int
    logits_width: int
    num_checkpoints: int | None = None
    """Saved states beside those of the slots; None for a model without recurrent states."""
    max_live_states: int | None = None
    """States of slots that the process's memory holds; None if that is one for each slot."""

    @property
    def num_live_states(self) -> int:
        """The slots that have a recurrent state, if the model has any: the first ones."""
        return self.max_num_seqs if self.max_live_states is None else min(self.max_num_seqs, self.max_live_states)


def require(condition: bool, message: str, **values: object) -> None:
    """Raise StepMismatchError unless `condition` holds."""
    if not condition:
        raise StepMismatchError(message, violations=(), retry_delay_s=None, **values)


def check_enter(enter: EnteringSequence, limits: BatchLimits, *, needs_all_tokens: bool) -> None:
    """Raise StepMismatchError for a sequence that fits no batch. Block ids and the chunk's tokens are not checked.

    `needs_all_tokens` requires the cached token ids, whatever the options.
    """
    slot = enter.chunk.slot
    num_tokens = enter.num_cached_tokens + enter.chunk.num_tokens + enter.chunk.num_later_tokens
    require(0 <= slot < limits.max_num_seqs, "a slot is out of range", slot=slot, limit=limits.max_num_seqs)
    require(enter.chunk.num_tokens > 0, "a sequence enters without tokens to compute", slot=slot)
    require(num_tokens <= limits.context_length, "a sequence is longer than the context", slot=slot)
    require(
        enter.num_cached_tokens >= 0 and enter.num_cached_tokens % limits.block_size == 0,
        "num_cached_tokens is not a whole number of blocks",
        slot=slot,
    )
    require(0 < enter.num_prompt_tokens <= num_tokens, "num_prompt_tokens is out of range", slot=slot)
    require(num_tokens < enter.max_num_tokens, "max_num_tokens leaves no token to generate", slot=slot)
    require(num_tokens <= len(enter.block_ids) * limits.block_size, "a block table is too short", slot=slot)
    _check_cached_tokens(enter, limits, needs_all_tokens=needs_all_tokens)
    _check_sampling(enter, limits)


def check_token_ids(slot: int, token_ids: Int32Column, limits: BatchLimits) -> None:
    """Raise StepMismatchError for a token outside the vocabulary."""
    require(
        not len(token_ids) or bool(0 <= token_ids.min() <= token_ids.max() < limits.logits_width),
        "a token id is out of range",
        slot=slot,
        limit=limits.logits_width,
    )


def _check_cached_tokens(enter: EnteringSequence, limits: BatchLimits, *, needs_all_tokens: bool) -> None:
    options, slot, cached_token_ids = enter.params.options, enter.chunk.slot, enter.cached_token_ids
    num_told = len(cached_token_ids)
    needs_all_tokens = needs_all_tokens or (options is not None and options.needs_all_tokens)
    require(
        num_told == enter.num_cached_tokens or (num_told == 0 and not needs_all_tokens),
        "cached_token_ids does not have one id per cached token",
        slot=slot,
    )
    check_token_ids(slot, cached_token_ids, limits)
    require(
        enter.num_cached_tokens == 0 or options is None or options.num_prompt_logprobs is None,
        "prompt log-probabilities are requested for a prompt with cached tokens",
        slot=slot,
    )
    require(
        enter.num_cached_tokens == 0 or options is None or options.pooling is not Pooling.MEAN,
        "the mean of a prompt with cached tokens is requested",
        slot=slot,
    )


def _check_sampling(enter: EnteringSequence, limits: BatchLimits) -> None:
    if enter.stop_token_ids:
        check_token_ids(enter.chunk.slot, np.array(enter.stop_token_ids), limits)
    model_limits = ModelLimits(limits.context_length, limits.logits_width, limits.num_blocks * limits.block_size)
    try:
        check_sampling(enter.params, model_limits)
    except InvalidRequestError as error:
        raise StepMismatchError(error.message, slot=enter.chunk.slot) from error
