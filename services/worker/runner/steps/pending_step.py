"""Steps between their launch and their results."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from services.worker.parallel.rendezvous import PartnerLostError
from services.worker.runner.rank import Rank
from services.worker.runner.steps.step_job import StepJob
from services.worker.runner.stream import EnqueuedWork
from services.worker.sampling.logprobs import make_logprobs
from services.worker.sampling.row_options import ScoredPlaces
from services.worker.sampling.runs import SampledTokens
from services.worker.sampling.sampling_rows import EditedRows
from shared.errors import InternalError, ServiceError
from shared.step.columns import Int32Column
from shared.step.logprobs import Logprobs
from shared.step.step import Step, StepResult

logger = logging.getLogger(__name__)

_Array = npt.NDArray[Any]
_NO_TOKENS: Int32Column = np.empty(0, np.int32)


class Downloads(NamedTuple):
    """What a step has downloaded."""

    drawn: npt.NDArray[np.int64]
    """[num_places], the tokens that the device drew, -1 where logits are not finite."""
    sampled: SampledTokens
    """The rows' tokens, without what else their options ask for."""
    others: list[_Array]
    """The rest, in the order of `JobResults.tensors`."""
    device_time_us: int


@dataclass(slots=True)
class PendingStep:
    """A step that was launched. `finish` is called once, the others any number of times, all from any thread."""

    step: Step
    job: StepJob
    enqueued: Sequence[EnqueuedWork]
    rank: Rank
    is_computed: bool
    """Whether `finish` returns at once, for certain."""
    edited: EditedRows | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _downloads: Downloads | None = None

    def finish(self) -> StepResult:
        """Wait for the device, without spinning, read the results and count the step.

        Raises:
            InternalError: the computation or the device failed.
        """
        step, step_input, results = self.step, self.job.step_input, self.job.results
        draft_counts = step_input.draft_counts
        with reported(step):
            drawn, sampled, others, device_time_us = self.read()
            arrays = iter(others)
            if step_input.has_options and results.drawn is not None:
                sampled = self._with_options(sampled, drawn, arrays)
            if step_input.row_numbers is not None:
                sampled = sampled.of_some(step_input.row_numbers, step_input.num_result_rows)
            prompts = [(each.slot, make_logprobs(_take(arrays, 3), each.indexes)) for each in results.prompts]
            vectors = () if results.vectors is None else zip(results.vectors.slots, next(arrays), strict=True)
            not_finite = _NO_TOKENS if results.not_finite_saves is None else next(arrays).nonzero()[0].astype(np.int32)
            result = StepResult(
                epoch=step.epoch,
                step_id=step.step_id,
                token_ids=sampled.token_ids,
                not_finite_rows=sampled.not_finite_rows,
                failed_grammar_rows=sampled.failed_grammar_rows,
                device_time_us=device_time_us,
                counts=sampled.counts,
                num_draft_tokens=0 if draft_counts is None else int(draft_counts.sum()),
                logprobs=sampled.logprobs,
                prompt_logprobs=tuple(prompts),
                not_finite_saves=not_finite,
                vectors=tuple(vectors),
            )
        self.rank.totals.add(step, num_tokens=step_input.num_tokens, device_time_us=device_time_us)
        return result

    def read(self) -> Downloads:
        """What the device has computed. Waits as `finish` does."""
        with self._lock:
            if self._downloads is None:
                device_time_us = sum(work.wait() for work in self.enqueued)
                others, results = self.job.staging.read(), self.job.results
                drawn = np.empty(0, np.int64) if results.drawn is None else others.pop()
                counts = None if results.counts is None else others.pop()
                sampled = self.job.step_input.runs.sampled(drawn, counts)
                self._downloads = Downloads(drawn, sampled, others, device_time_us)
            return self._downloads

    def _with_options(
        self, sampled: SampledTokens, drawn: npt.NDArray[np.int64], arrays: Iterator[_Array]
    ) -> SampledTokens:
        """With what the rows' options ask for, of which scores are the first `arrays`."""
        results = self.job.results
        if results.failed_rows is not None:
            failed = results.failed_rows[drawn[self.job.step_input.runs.firsts[results.failed_rows]] >= 0]
            sampled = replace(sampled, failed_grammar_rows=failed.astype(np.int32))
        if results.scored is not None:
            sampled = replace(sampled, logprobs=_logprobs(results.scored, drawn, sampled.counts, _take(arrays, 3)))
        return sampled


@contextmanager
def reported(step: Step) -> Iterator[None]:
    """Log errors here, because the stream that would carry them may be gone by then.

    Raises:
        InternalError: for all that is no `ServiceError`.
    """
    try:
        yield
    except ServiceError as error:
        logger.warning("step refused", extra={"epoch": step.epoch, "step_id": step.step_id, "error": str(error)})
        raise
    except PartnerLostError as error:
        # No bug of this process: where it was computing says nothing.
        logger.warning("step broken off", extra={"epoch": step.epoch, "step_id": step.step_id, "error": str(error)})
        raise InternalError("the step was broken off: a partner is lost") from error
    except Exception as error:
        logger.exception("step failed", extra={"epoch": step.epoch, "step_id": step.step_id})
        raise InternalError("the step failed") from error


def _logprobs(
    scored: ScoredPlaces, drawn: npt.NDArray[np.int64], counts: Int32Column | None, scores: list[_Array]
) -> Logprobs | None:
    is_wanted = scored.is_counted(counts) & (drawn[scored.places] >= 0)
    if not is_wanted.any():
        return None
    wanted = [values[is_wanted] for values in scores]
    return make_logprobs(wanted, scored.indexes(counts)[is_wanted], scored.wanted.of_rows(is_wanted))


def _take(arrays: Iterator[_Array], count: int) -> list[_Array]:
    return list(islice(arrays, count))
