"""Steps between their launch and their results."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.batch.replay import compare_replays
from services.worker.batch.step_input import StepInput, StepTokens
from services.worker.forward.forward_context import Progress
from services.worker.forward.staging import Staging
from services.worker.runner.prompt_logprobs import PromptScores
from services.worker.runner.stream import Launch, Stream
from services.worker.sampling.logprobs import ScoreTensors, make_logprobs
from services.worker.sampling.row_options import RowOptions
from services.worker.sampling.sampler import SampledTokens
from services.worker.sampling.sampling_rows import EditedRows
from services.worker.step import Int32Column, Logprobs, Step, StepOutput

_Array = npt.NDArray[Any]
_NO_TOKENS: Int32Column = np.empty(0, np.int32)


@dataclass(slots=True)
class StepResults:
    """What a step's work leaves for the host. Only that work writes it."""

    drawn: Tensor | None = None
    """[num_rows] int64: the rows' tokens, -1 where logits are not finite; None without rows, or if the host drew."""
    scores: ScoreTensors | None = None
    """For rows that want log-probabilities."""
    prompts: tuple[PromptScores, ...] = ()
    likeliest: Tensor | None = None
    """What replayed completions are compared with."""
    sampled: SampledTokens | None = None
    """What the host drew, if tokens are drafted."""

    def tensors(self) -> list[Tensor]:
        """All of them, in the order in which `PendingStep` reads them."""
        prompts = (tensor for prompt in self.prompts for tensor in prompt.scores)
        optional = (self.drawn, *(self.scores or ()), *prompts, self.likeliest)
        return [tensor for tensor in optional if tensor is not None]


@dataclass(slots=True)
class PendingStep:
    """A step that was launched. `finish` is called once, `drawn` any number of times, both from any thread."""

    step: Step
    step_input: StepInput
    tokens: StepTokens | None
    launches: Sequence[Launch]
    stream: Stream
    staging: Staging
    progress: Progress
    results: StepResults
    options: RowOptions | None = None
    edited: EditedRows | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _arrays: list[_Array] | None = None
    _device_time_us: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that it computes, of prompts and completions; a dummy has one."""
        return self.step_input.num_tokens

    @property
    def is_computed(self) -> bool:
        """Whether `finish` returns at once, for certain."""
        return not self.stream.is_async

    def drawn(self) -> npt.NDArray[np.int64]:
        """[num_rows], the tokens that the device drew, -1 where logits are not finite. Waits as `finish` does."""
        arrays = self._read()
        return np.empty(0, np.int64) if self.results.drawn is None else arrays[0]

    def finish(self) -> StepOutput:
        """Wait for the device, without spinning, and read the results.

        Raises what the computation raised, or RuntimeError if the device failed.
        """
        arrays = iter(self._read())
        sampled = self._sampled(arrays) if self.results.sampled is None else self.results.sampled
        prompts = [(each.slot, make_logprobs(_take(arrays, 3), each.indexes)) for each in self.results.prompts]
        num_replayed = num_different = 0
        if self.results.likeliest is not None:
            assert self.tokens is not None, "what is replayed has tokens"
            chunks, likeliest = self.step_input.replayed_chunks, next(arrays)
            num_replayed, num_different = compare_replays(chunks, likeliest, self.tokens.token_ids)
        step_input = self.step_input
        output = StepOutput(
            epoch=self.step.epoch,
            step_id=self.step.step_id,
            token_ids=sampled.token_ids,
            not_finite_rows=_result_rows(step_input, sampled.not_finite_rows),
            failed_grammar_rows=_result_rows(step_input, sampled.failed_grammar_rows),
            device_time_us=self._device_time_us,
            counts=_result_counts(step_input, sampled.counts),
            num_draft_tokens=len(step_input.draft_token_ids),
            logprobs=sampled.logprobs,
            prompt_logprobs=tuple(prompts),
            num_replayed_tokens=num_replayed,
            num_replay_mismatches=num_different,
        )
        self.progress.advance_step()
        return output

    def _read(self) -> list[_Array]:
        """What the step downloaded."""
        with self._lock:
            if self._arrays is None:
                self._device_time_us = sum(launch.wait() for launch in self.launches)
                self._arrays = self.staging.read()
                self.stream.return_staging(self.staging)
            return self._arrays

    def _sampled(self, arrays: Iterator[_Array]) -> SampledTokens:
        """What the device drew."""
        if self.results.drawn is None:
            return SampledTokens(_NO_TOKENS, _NO_TOKENS)
        drawn = next(arrays)
        failed = _NO_TOKENS
        if self.edited is not None:
            rows = self.edited.numbers[self.edited.has_failed]
            failed = rows[drawn[rows] >= 0].astype(np.int32)
        logprobs = None if self.results.scores is None else self._logprobs(drawn, _take(arrays, 3))
        token_ids = np.maximum(drawn, 0).astype(np.int32)
        not_finite_rows = (drawn < 0).nonzero()[0].astype(np.int32)
        return SampledTokens(token_ids, not_finite_rows, logprobs=logprobs, failed_grammar_rows=failed)

    def _logprobs(self, drawn: npt.NDArray[np.int64], scores: list[_Array]) -> Logprobs | None:
        assert self.options is not None, "scores of rows without options"
        rows = self.options.scored
        is_finite = drawn[rows] >= 0
        if not is_finite.any():
            return None
        finite = [values[is_finite] for values in scores]
        return make_logprobs(finite, rows[is_finite], self.options.wanted.of_rows(is_finite))


def _take(arrays: Iterator[_Array], count: int) -> list[_Array]:
    return list(islice(arrays, count))


def _result_counts(step_input: StepInput, counts: npt.NDArray[np.int32] | None) -> Int32Column | None:
    if step_input.row_numbers is None:
        return counts
    result_counts = np.zeros(step_input.num_result_rows, np.int32)
    result_counts[step_input.row_numbers] = 1 if counts is None else counts
    return result_counts


def _result_rows(step_input: StepInput, rows: Int32Column) -> Int32Column:
    return rows if step_input.row_numbers is None else step_input.row_numbers[rows].astype(np.int32)
