"""The end of steps in which tokens are drafted: the host decides which drafts to accept."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from services.worker.batch.device_batch import DeviceBatch
from services.worker.batch.input_batch import InputBatch
from services.worker.batch.step_input import StepInput, StepTokens
from services.worker.drafts.drafter import ComputedStep, DraftProposer
from services.worker.forward.staging import to_device
from services.worker.runner.rank import Rank
from services.worker.sampling.sampler import SampledTokens, Sampler
from services.worker.sampling.sampling_rows import SamplingRows
from shared.step.columns import Int32Column

_NO_TOKENS = SampledTokens(np.empty(0, np.int32), np.empty(0, np.int32))


class HostEnd:
    """Ends the steps of an epoch with a draft proposer, whose next step depends on how many tokens were accepted."""

    def __init__(self, rank: Rank, batch: InputBatch, columns: DeviceBatch, proposer: DraftProposer) -> None:
        self._device = rank.device
        self._batch = batch
        self._columns = columns
        self._proposer = proposer
        self._sampler = Sampler(rank.ops)

    def finish(
        self, step_input: StepInput, tokens: StepTokens, *, rows: SamplingRows, hidden: Tensor, logits: Tensor | None
    ) -> SampledTokens:
        """Draw, and tell batch and proposer what was drawn. Waits for the device.

        Args:
            rows: How the step's rows are drawn.
            hidden: [num_tokens, hidden].
            logits: Those of the rows and their drafts, [n, vocabulary] float32; None without a row.
        """
        sampled = _NO_TOKENS if logits is None else self._sampler.sample(logits, rows)
        token_ids = _usable_tokens(sampled)
        self._batch.record_sampled(step_input.row_slots, token_ids, sampled.counts)
        self._record(step_input, token_ids, sampled.counts)
        if len(hidden):
            self._proposer.observe(ComputedStep(step_input, tokens, hidden, token_ids, sampled.counts))
        return sampled

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
