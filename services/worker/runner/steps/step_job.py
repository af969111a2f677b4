"""A step's work on the device: what it reads on the host, and what it leaves there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from services.worker.batch.step_input import StepInput, StepTokens
from services.worker.forward.forward_context import DpMetadata
from services.worker.forward.staging import Staging
from services.worker.runner.prompt_logprobs import PromptScores
from services.worker.sampling.logprobs import ScoreTensors
from services.worker.sampling.row_options import RowOptions
from services.worker.sampling.sampler import SampledTokens
from services.worker.sampling.sampling_rows import SamplingRows


class DrawnRows(NamedTuple):
    """The rows of a step, on the device."""

    slots: Tensor | None
    """[num_rows] int64; None for a plain decode, whose slots the device knows."""
    positions: Tensor
    """[num_rows] int64: where their tokens are drawn."""
    logit_tokens: Tensor | None
    """[num_rows] int64: the tokens whose logits are drawn from; None means all."""


class Draw(NamedTuple):
    """The tokens of a step's rows."""

    rows: DrawnRows
    logits: Tensor | None
    """[num_rows, vocabulary] float32; None if a graph has used them, which it does for rows without options."""
    drawn: Tensor
    """[num_rows] int64, -1 where logits are not finite."""


@dataclass(slots=True)
class JobResults:
    """What a step's work leaves for the host. Only that work writes it."""

    drawn: Tensor | None = None
    """[num_rows] int64: the rows' tokens, -1 where logits are not finite; None without rows, or if the host drew."""
    scores: ScoreTensors | None = None
    """Scores of rows that want log-probabilities."""
    prompts: tuple[PromptScores, ...] = ()
    not_finite_saves: Tensor | None = None
    """[num_saves] int32, 1 for a saved state that is not finite; None without saves."""
    sampled: SampledTokens | None = None
    """What the host drew, if tokens are drafted."""

    def tensors(self) -> list[Tensor]:
        """All of them, in the order in which `PendingStep` reads them."""
        prompts = (tensor for prompt in self.prompts for tensor in prompt.scores)
        optional = (self.drawn, *(self.scores or ()), *prompts, self.not_finite_saves)
        return [tensor for tensor in optional if tensor is not None]


@dataclass(slots=True)
class StepJob:
    """A step's work on the device, with all that it reads on the host."""

    step_input: StepInput
    staging: Staging
    dp: DpMetadata
    decode_graph: int | None
    """The batch size of the graph of one token per row that computes it; None if none does."""
    draft_graph: int | None
    """Likewise of the graph of tokens with drafts."""
    tokens: StepTokens | None
    """None if the device makes them."""
    sampling: SamplingRows | None
    """The sampling of rows with options, or of all rows in an epoch with drafts."""
    options: RowOptions | None
    """The options of rows that the device draws; None if none has any."""
    results: JobResults
    first_draw: Draw | None = None
    """The draw of a step with edited rows, until these are drawn again."""

    @property
    def is_edited(self) -> bool:
        """Whether the host edits the logits of rows."""
        return self.options is not None and len(self.options.edited) > 0
