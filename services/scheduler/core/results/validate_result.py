"""Keeps a worker's mistakes from clients."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.batch.row_tokens import RowTokens
from services.scheduler.core.batch.slot_table import SlotTable
from services.scheduler.core.batch.step import StepRecord
from shared.ids import Slot
from shared.request.limits import TOKEN_DTYPE
from shared.step.columns import Int32Column
from shared.step.logprobs import Logprobs
from shared.step.step import StepResult


def validate_result(result: StepResult, record: StepRecord, slots: SlotTable, logits_width: int) -> str | None:
    """Say why a result cannot be the answer to its step; None when it can.

    `record` is the step with the result's id, and `slots` the state before the result.
    """
    num_rows, num_tokens = len(record.row_slots), len(result.token_ids)
    if num_tokens != num_rows and result.counts is None:
        return f"{num_tokens} tokens for {num_rows} rows"
        # As unsigned numbers, negative ones are too large as well.
    if num_tokens and result.token_ids.view(np.uint32).max() >= logits_width:
        return "a token id is out of range"
    for bad_rows in (result.not_finite_rows, result.failed_grammar_rows):
        if bad_rows.size and not 0 <= int(bad_rows.min()) <= int(bad_rows.max()) < num_rows:
            return "a row number is out of range"
    saves = result.not_finite_saves
    if saves.size and not 0 <= int(saves.min()) <= int(saves.max()) < len(record.state_saves):
        return "a saved state's number is out of range"
    if result.num_draft_tokens > num_rows * slots.num_draft_tokens:
        return f"{result.num_draft_tokens} drafts for {num_rows} rows"
    problem = None
    if result.logprobs is not None:
        problem = _find_bad_logprobs(result.logprobs, result.token_ids, logits_width)
    if problem is None and result.prompt_logprobs:
        problem = _find_bad_prompt_logprobs(result, record, slots, logits_width)
    if problem is None and result.vectors:
        problem = _find_bad_vectors(result, record, slots)
    if problem is None and (result.counts is not None or slots.num_draft_tokens):
        rows = RowTokens.of_result(result, record.row_slots, slots.num_draft_tokens)
        problem = rows.find_bad_counts(slots, result.not_finite_rows)
    return problem


def _find_bad_logprobs(logprobs: Logprobs, token_ids: Int32Column, logits_width: int) -> str | None:
    fault = logprobs.find_fault(len(token_ids), logits_width)
    if fault is None and (logprobs.own_token_ids() != token_ids[logprobs.indexes]).any():
        return "log-probabilities of another token"
    return fault


def _find_bad_prompt_logprobs(
    result: StepResult, record: StepRecord, slots: SlotTable, logits_width: int
) -> str | None:
    prompts = {*record.partial_slots, *record.row_slots.tolist()}
    for slot, logprobs in result.prompt_logprobs:
        if slot not in prompts:
            return "log-probabilities of a prompt that is not in the step"
        prompts.remove(slot)
        seq = slots.sequence_at(Slot(slot))
        if not seq.has_prompt_logprobs:
            return "log-probabilities of a prompt whose request does not ask for them"
        fault = logprobs.find_fault(seq.num_prompt_tokens, logits_width)
        if fault is None and logprobs.indexes.size:
            # For a request that has ended, positions delivered so far are not tracked.
            last_delivered = seq.last_prompt_logprob if slots.live[slot] else seq.num_prompt_tokens
            fault = _find_bad_positions(logprobs, np.frombuffer(seq.token_bytes, TOKEN_DTYPE), last_delivered)
        if fault is not None:
            return fault
    return None


def _find_bad_vectors(result: StepResult, record: StepRecord, slots: SlotTable) -> str | None:
    ended = set(record.row_slots.tolist())
    for slot, values in result.vectors:
        if slot not in ended:
            return "a vector of a prompt that does not end with the step"
        ended.remove(slot)
        options = slots.sequence_at(Slot(slot)).params.options
        if options is None or options.pooling is None:
            return "a vector of a prompt whose request does not ask for one"
        if not len(values):
            return "a vector without values"
    return None


def _find_bad_positions(logprobs: Logprobs, token_ids: Int32Column, last_delivered: int) -> str | None:
    """Positions must continue or repeat those delivered."""
    indexes = logprobs.indexes
    if not 1 <= indexes[0] <= last_delivered + 1 or indexes[-1] - indexes[0] + 1 != len(indexes):
        return "log-probabilities leave out a position of a prompt"
    return "log-probabilities of another token" if (logprobs.own_token_ids() != token_ids[indexes]).any() else None
