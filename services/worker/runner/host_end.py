"""The end of steps that the device cannot end alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from services.worker.batch.replay import ReplayScorer
from services.worker.batch.step_input import StepInput, StepTokens
from services.worker.forward.staging import to_device
from services.worker.runner.device_batch import DeviceBatch
from services.worker.runner.input_batch import InputBatch
from services.worker.runner.pending_step import HostResult
from services.worker.runner.prompt_logprobs import PromptScorer
from services.worker.runner.rank import Rank
from services.worker.sampling.sampler import SampledTokens, Sampler, SamplingRows
from services.worker.spec_decode.drafts import ComputedStep, DraftProposer
from services.worker.step import Int32Column, PromptLogprobs

_NO_TOKENS = SampledTokens(np.empty(0, np.int32), np.empty(0, np.int32))


class HostEnd:
    """Ends the steps of an epoch of which the host must know the tokens, or a part of the logits."""

    def __init__(self, rank: Rank, batch: InputBatch, columns: DeviceBatch, proposer: DraftProposer | None) -> None:
        self._device = rank.device
        self._batch = batch
        self._columns = columns
        self._proposer = proposer
        self._sampler = Sampler(rank.ops)
        self._prompt_scorer = PromptScorer(rank.ops, rank.model.compute_logits)
        self._replay_scorer = ReplayScorer(rank.ops, rank.model.compute_logits)

    def finish(
        self,
        step_input: StepInput,
        tokens: StepTokens | None,
        *,
        rows: SamplingRows,
        hidden: Tensor,
        compute_logits: Callable[[], Tensor],
    ) -> HostResult:
        """Score, draw, and tell the batch what was drawn. Waits for the device.

        Args:
            tokens: None for a decode without chunks and drafts.
            rows: How the step's rows are drawn.
            hidden: [num_tokens, hidden].
            compute_logits: Computes those of the rows.
        """
        known_ids = np.empty(0, np.int64) if tokens is None else tokens.token_ids
        prompt_logprobs: PromptLogprobs = ()
        replays = 0, 0
        if step_input.scored_chunks:
            prompt_logprobs = self._prompt_scorer.score(step_input.scored_chunks, known_ids, hidden)
        if step_input.replayed_chunks:
            replays = self._replay_scorer.score(step_input.replayed_chunks, known_ids, hidden)
        sampled = _NO_TOKENS
        if len(step_input.row_slots):
            sampled = self._sampler.sample(compute_logits(), rows)
        token_ids = _usable_tokens(sampled)
        self._batch.record_sampled(step_input.row_slots, token_ids, sampled.counts)
        self._record(step_input, token_ids, sampled.counts)
        if self._proposer is not None and tokens is not None and len(hidden):
            self._proposer.observe(ComputedStep(step_input, tokens, hidden, token_ids, sampled.counts))
        return HostResult(sampled, prompt_logprobs, *replays)

    def _record(self, step_input: StepInput, token_ids: Int32Column, counts: Int32Column | None) -> None:
        """Give the device each row's last token and its position."""
        positions = step_input.row_positions
        if counts is not None:
            token_ids, positions = token_ids[np.cumsum(counts) - 1], positions + (counts - 1)
        slots = step_input.row_slots.astype(np.int64)
        columns = (to_device(values, self._device) for values in (slots, token_ids.astype(np.int64), positions))
        self._columns.record(*columns)


def _usable_tokens(sampled: SampledTokens) -> Int32Column:
    """Meaningless tokens are replaced by token 0, which every model has."""
    if not len(sampled.not_finite_rows):
        return sampled.token_ids
    # A row that is not finite has one token.
    places = sampled.not_finite_rows
    if sampled.counts is not None:
        places = (np.cumsum(sampled.counts, dtype=np.int32) - sampled.counts)[places]
    token_ids = sampled.token_ids.copy()
    token_ids[places] = 0
    return token_ids
