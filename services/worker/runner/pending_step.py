"""Steps between their launch and their results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.batch.step_input import StepInput
from services.worker.forward.forward_context import Progress
from services.worker.forward.staging import Staging
from services.worker.runner.stream import Launch, Stream
from services.worker.sampling.sampler import SampledTokens
from services.worker.step import Int32Column, PromptLogprobs, Step, StepOutput

_NO_TOKENS: Int32Column = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class HostResult:
    """What a step that needs the host found there."""

    sampled: SampledTokens
    prompt_logprobs: PromptLogprobs
    num_replayed_tokens: int
    num_replay_mismatches: int


@dataclass(slots=True)
class PendingStep:
    """A step that was launched. `finish` is called once, from any thread."""

    step: Step
    step_input: StepInput
    launch: Launch
    stream: Stream
    staging: Staging
    progress: Progress
    result: HostResult | None = None
    """Set when the launch has computed a step that needs the host."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes, of prompts and completions; a dummy has one."""
        return self.step_input.num_tokens

    @property
    def is_computed(self) -> bool:
        """Whether `finish` returns at once, for certain."""
        return not self.stream.is_async

    def finish(self) -> StepOutput:
        """Wait for the device, without spinning, and read the tokens.

        Raises what the computation raised, or RuntimeError if the device failed.
        """
        device_time_us = self.launch.wait()
        output = self._drawn(device_time_us) if self.result is None else self._sampled(self.result, device_time_us)
        self.stream.return_staging(self.staging)
        self.progress.advance_step()
        return output

    def _drawn(self, device_time_us: int) -> StepOutput:
        """The result of a step whose tokens only the device knew."""
        drawn = self.staging.read() if len(self.step_input.row_slots) else _NO_TOKENS
        return StepOutput(
            epoch=self.step.epoch,
            step_id=self.step.step_id,
            token_ids=np.maximum(drawn, 0).astype(np.int32),
            not_finite_rows=(drawn < 0).nonzero()[0].astype(np.int32),
            device_time_us=device_time_us,
        )

    def _sampled(self, result: HostResult, device_time_us: int) -> StepOutput:
        step_input, sampled = self.step_input, result.sampled
        return StepOutput(
            epoch=self.step.epoch,
            step_id=self.step.step_id,
            token_ids=sampled.token_ids,
            not_finite_rows=_result_rows(step_input, sampled.not_finite_rows),
            failed_grammar_rows=_result_rows(step_input, sampled.failed_grammar_rows),
            device_time_us=device_time_us,
            counts=_result_counts(step_input, sampled.counts),
            num_draft_tokens=len(step_input.draft_token_ids),
            logprobs=sampled.logprobs,
            prompt_logprobs=result.prompt_logprobs,
            num_replayed_tokens=result.num_replayed_tokens,
            num_replay_mismatches=result.num_replay_mismatches,
        )


def _result_counts(step_input: StepInput, counts: npt.NDArray[np.int32] | None) -> Int32Column | None:
    if step_input.row_numbers is None:
        return counts
    result_counts = np.zeros(step_input.num_result_rows, np.int32)
    result_counts[step_input.row_numbers] = 1 if counts is None else counts
    return result_counts


def _result_rows(step_input: StepInput, rows: Int32Column) -> Int32Column:
    return rows if step_input.row_numbers is None else step_input.row_numbers[rows].astype(np.int32)
