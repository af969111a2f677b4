"""Checks on sequences that enter the batch: they came over the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequestError, StepMismatchError
from shared.request.limits import ModelLimits
from shared.request.sampling_params import Pooling, SamplingParams, check_sampling
from shared.step.columns import Int32Column
from shared.step.step import Chunks, Enters


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


def are_distinct(slots: npt.NDArray[np.integer[Any]]) -> bool:
    """Whether no slot occurs twice; they are in range."""
    return len(slots) < 2 or bool(np.bincount(slots).max() == 1)


def check_enters(enters: Enters, chunks: Chunks, limits: BatchLimits, *, needs_all_tokens: bool) -> None:
    """Raise StepMismatchError for sequences that fit no batch. Block ids and the tokens of chunks are not checked.

    `chunks` are the step's, of which theirs are the last ones. `needs_all_tokens` requires the cached token ids,
    whatever the options.
    """
    num_enters = len(enters.slots)
    numbers = zip(
        enters.slots.tolist(),
        enters.num_cached_tokens.tolist(),
        chunks.num_tokens[-num_enters:].tolist(),
        chunks.num_later_tokens[-num_enters:].tolist(),
        enters.num_prompt_tokens.tolist(),
        enters.max_num_tokens.tolist(),
        enters.num_blocks.tolist(),
        strict=True,
    )
    for slot, num_cached_tokens, num_new, num_later, num_prompt_tokens, max_num_tokens, num_blocks in numbers:
        num_tokens = num_cached_tokens + num_new + num_later
        require(slot < limits.max_num_seqs, "a slot is out of range", slot=slot, limit=limits.max_num_seqs)
        require(num_new > 0, "a sequence enters without tokens to compute", slot=slot)
        require(num_tokens <= limits.context_length, "a sequence is longer than the context", slot=slot)
        is_whole = num_cached_tokens % limits.block_size == 0
        require(is_whole, "num_cached_tokens is not a whole number of blocks", slot=slot)
        require(0 < num_prompt_tokens <= num_tokens, "num_prompt_tokens is out of range", slot=slot)
        require(num_tokens < max_num_tokens, "max_num_tokens leaves no token to generate", slot=slot)
        require(num_tokens <= num_blocks * limits.block_size, "a block table is too short", slot=slot)
    _check_cached_tokens(enters, limits, needs_all_tokens=needs_all_tokens)
    _check_sampling(enters, limits)


def check_token_ids(column: str, token_ids: Int32Column, limits: BatchLimits) -> None:
    """Raise StepMismatchError for a token outside the vocabulary."""
    require(
        not len(token_ids) or bool(0 <= token_ids.min() <= token_ids.max() < limits.logits_width),
        "a token id is out of range",
        column=column,
        limit=limits.logits_width,
    )


def _check_cached_tokens(enters: Enters, limits: BatchLimits, *, needs_all_tokens: bool) -> None:
    numbers = zip(enters.num_cached_tokens.tolist(), enters.num_told_tokens.tolist(), strict=True)
    for number, (num_cached_tokens, num_told_tokens) in enumerate(numbers):
        if not num_cached_tokens and not num_told_tokens:
            continue
        slot, options = int(enters.slots[number]), enters.options.get(number)
        needs_all = needs_all_tokens or (options is not None and options.needs_all_tokens)
        require(
            num_told_tokens == num_cached_tokens or (num_told_tokens == 0 and not needs_all),
            "cached_token_ids does not have one id per cached token",
            slot=slot,
        )
        require(
            options is None or options.num_prompt_logprobs is None,
            "prompt log-probabilities are requested for a prompt with cached tokens",
            slot=slot,
        )
        require(
            options is None or options.pooling is not Pooling.MEAN,
            "the mean of a prompt with cached tokens is requested",
            slot=slot,
        )
    check_token_ids("enters.cached_token_ids", enters.told_token_ids, limits)


def _check_sampling(enters: Enters, limits: BatchLimits) -> None:
    for token_ids in enters.stop_token_ids.values():
        check_token_ids("enters.stop_token_ids", token_ids, limits)
    model_limits = ModelLimits(limits.context_length, limits.logits_width, limits.num_blocks * limits.block_size)
    # Sequences of one step are mostly sampled alike; any seed and any choice will do.
    columns = [enters.sampled[name].tolist() for name in ("temperature", "top_k", "top_p")]
    number_of = {sampled: number for number, sampled in enumerate(zip(*columns, strict=True))}
    for number in {*number_of.values(), *enters.options}:
        temperature, top_k, top_p = (column[number] for column in columns)
        max_tokens = int(enters.max_num_tokens[number] - enters.num_prompt_tokens[number])
        params = SamplingParams(max_tokens, temperature, top_k, top_p, options=enters.options.get(number))
        try:
            check_sampling(params, model_limits)
        except InvalidRequestError as error:
            raise StepMismatchError(error.message, slot=int(enters.slots[number])) from error
