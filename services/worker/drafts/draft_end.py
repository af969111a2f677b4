"""The end of steps in which tokens are drafted: the host learns how many drafts were accepted."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.input_batch import InputBatch
from services.worker.batch.step_input import StepInput, StepTokens
from services.worker.drafts.drafter import ComputedStep, DraftProposer
from services.worker.sampling.runs import Runs, SampledTokens
from shared.step.columns import Int32Column

_NO_TOKENS: Int32Column = np.empty(0, np.int32)


class DraftEnd:
    """Ends the steps of an epoch with a draft proposer, whose next step depends on how many tokens were accepted."""

    def __init__(self, batch: InputBatch, proposer: DraftProposer) -> None:
        self._batch = batch
        self._proposer = proposer

    def learn(
        self, step_input: StepInput, tokens: StepTokens, hidden: Tensor, sampled: SampledTokens | None
    ) -> Int32Column | None:
        """Tell batch and proposer what was drawn, nothing without rows: the rows' counts, None for one each."""
        token_ids, counts = _NO_TOKENS, None
        if sampled is not None:
            token_ids, counts = sampled.token_ids, sampled.counts
        self._batch.record_sampled(step_input.row_slots, token_ids, counts)
        if len(hidden):
            self._proposer.observe(ComputedStep(step_input, tokens, hidden, token_ids, counts))
        return counts


def read_tokens(drawn: Tensor, counts: Tensor | None, runs: Runs) -> SampledTokens:
    """The tokens of `JobResults`, in one transfer that the host waits for."""
    if counts is None:
        return SampledTokens.of(drawn.cpu().numpy())
    both = torch.cat((drawn, counts)).cpu().numpy()
    return runs.cut(both[: len(drawn)], both[len(drawn) :])
