"""A step's work on the device: what it reads on the host, and what it leaves there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.batch.step_input import StepInput
from services.worker.forward.forward_context import DpMetadata
from services.worker.forward.staging import Staging
from services.worker.runner.pooling import PromptVectors
from services.worker.runner.prompt_logprobs import PromptScores
from services.worker.runner.steps.coupling import StepGraph
from services.worker.sampling.logprobs import ScoreTensors
from services.worker.sampling.row_options import RowOptions, ScoredPlaces


class Draw(NamedTuple):
    """The tokens of a step's rows."""

    arrays: dict[str, Tensor]
    """The step's, on the device; see `StepInput.arrays`."""
    positions: Tensor
    """[num_rows] int64: where the rows' first tokens are drawn."""
    logits: Tensor | None
    """[num_places, vocabulary] float32; None if a graph has used them, which it does for rows without options."""
    drawn: Tensor
    """[num_places] int64, -1 where logits are not finite."""


@dataclass(slots=True)
class JobResults:
    """What a step's work leaves for the host. Only that work writes it."""

    drawn: Tensor | None = None
    """[num_places] int64: the rows' tokens, -1 where logits are not finite; None without rows."""
    counts: Tensor | None = None
    """[num_rows] int64: how many tokens each row gets; None means one each."""
    scores: ScoreTensors | None = None
    """Scores of the tokens at `scored`."""
    scored: ScoredPlaces | None = None
    """None without rows that want log-probabilities."""
    failed_rows: npt.NDArray[np.int64] | None = None
    """Rows with a grammar that could not be followed; None if none has one."""
    prompts: tuple[PromptScores, ...] = ()
    vectors: PromptVectors | None = None
    """None if no prompt with a vector ends here."""
    not_finite_saves: Tensor | None = None
    """[num_saves] int32, 1 for a saved state that is not finite; None without saves."""

    def tensors(self) -> list[Tensor]:
        """All of them, in the order in which `PendingStep` reads them."""
        prompts = (tensor for prompt in self.prompts for tensor in prompt.scores)
        vectors = None if self.vectors is None else self.vectors.values
        optional = (*(self.scores or ()), *prompts, vectors, self.not_finite_saves, self.counts, self.drawn)
        return [tensor for tensor in optional if tensor is not None]


@dataclass(slots=True)
class StepJob:
    """A step's work on the device, with all that it reads on the host."""

    step_input: StepInput
    staging: Staging
    dp: DpMetadata
    graph: StepGraph | None
    """The graph that computes it; None if none does."""
    options: RowOptions
    """The options of the rows."""
    results: JobResults
    hidden: Tensor | None = None
    """[num_tokens, hidden], the model's output for the step's tokens, for a draft proposer; None once it was noted."""
    first_draw: Draw | None = None
    """The draw of a step with edited rows, until these are drawn again."""
