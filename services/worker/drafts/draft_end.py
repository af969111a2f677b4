"""The end of steps in which tokens are drafted: the host learns how many drafts were accepted."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.input_batch import InputBatch
from services.worker.batch.step_input import StepInput, StepTokens
from services.worker.drafts.drafted_states import ModelStates
from services.worker.drafts.drafter import ComputedStep, DraftProposer
from services.worker.drafts.state_end import StateEnd
from services.worker.sampling.runs import Runs, SampledTokens
from shared.step.columns import Int32Column

_NO_TOKENS: Int32Column = np.empty(0, np.int32)


class DraftEnd:
    """Ends the steps of an epoch with a draft proposer, whose next step depends on how many tokens were accepted."""

    def __init__(self, batch: InputBatch, proposer: DraftProposer, states: ModelStates | None, block_size: int) -> None:
        """`states` are those of a model with recurrent layers."""
        self._batch = batch
        self._proposer = proposer
        self._states = None
        if states is not None and states.drafted is not None:
            self._states = StateEnd(states.cache, states.drafted, block_size)

    def finish(
        self, step_input: StepInput, tokens: StepTokens, hidden: Tensor, sampled: SampledTokens | None, row_width: int
    ) -> Tensor | None:
        """Tell batch, proposer and states what was drawn. The host does not wait for it.

        Args:
            hidden: [num_tokens, hidden], the step's own tokens'.
            sampled: The rows' tokens; None without rows.
            row_width: Tokens between the firsts of two decodes in a graph of drafts; 0 for a step without padding.

        Returns:
            As `StateEnd.finish`; None for a model without states.
        """
        token_ids, counts = _NO_TOKENS, None
        if sampled is not None:
            token_ids, counts = sampled.token_ids, sampled.counts
        self._batch.record_sampled(step_input.row_slots, token_ids, counts)
        if len(hidden):
            self._proposer.observe(ComputedStep(step_input, tokens, hidden, token_ids, counts))
        if self._states is None:
            return None
        firsts = step_input.cu_seqlens_q[: step_input.num_decodes]
        if row_width:
            firsts = np.arange(step_input.num_decodes, dtype=np.int32) * np.int32(row_width)
        return self._states.finish(step_input, counts, firsts)


def read_tokens(drawn: Tensor, counts: Tensor | None, runs: Runs) -> SampledTokens:
    """The tokens of `JobResults`, in one transfer that the host waits for."""
    if counts is None:
        return SampledTokens.of(drawn.cpu().numpy())
    both = torch.cat((drawn, counts)).cpu().numpy()
    return runs.cut(both[: len(drawn)], both[len(drawn) :])
