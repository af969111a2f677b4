"""One step for all coupled ranks.

Collectives span coupled ranks, so each runs a step whenever one does. The plan contains what ATOM's ranks find out by
an all-reduce: whether any rank prefills, how many tokens each computes, and the batch size to which graphs are padded.
Source: ATOM, `DPEngineCoreProc` (model_engine/engine_core.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from services.scheduler.core.batch.step import ScheduledBatch, Step, StepPace
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.worker_facts import WorkerFacts
from shared.step.step import StepKind


def common_graph_sizes(facts: Sequence[WorkerFacts]) -> list[int]:
    """The batch sizes, ascending, for which all of at least one rank have a graph."""
    return sorted(set.intersection(*(set(one.graph_batch_sizes) for one in facts)))


def graph_batch_size(num_rows: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes`, which ascend, that holds the rows; 0 if none does, and the step is eager."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else 0


class LockstepPlanner:
    """Combines the batches of coupled ranks into steps that they run together.

    If any rank has a prefill, the step is eager for all: the others run their decodes alongside, or a dummy prefill of
    one token. Otherwise it is a decode at one padded size, if all ranks have a graph that holds it, and idle ranks run
    a dummy of it. A step is sent when some rank has work and every rank has room in flight.

    A prefill makes the step long for every rank, so prefills wait up to `max_wait_steps` decode steps until each rank
    has one, unless a rank would run only dummies meanwhile.

    Invariant: all ranks have been sent the same steps of their epoch.
    """

    def __init__(self, schedulers: Sequence[Scheduler], max_wait_steps: int) -> None:
        self._schedulers = schedulers
        self._max_wait_steps = max_wait_steps
        self._num_waited_steps = 0
        self._graph_sizes: list[int] = []

    def begin_epoch(self, facts: Sequence[WorkerFacts]) -> None:
        """All ranks have been attached."""
        self._graph_sizes = common_graph_sizes(facts)

    def steps(self, epoch: int, now: float) -> Iterator[list[Step]]:
        """Send steps, each a list by rank, while some rank has work and all have room."""
        while all(scheduler.has_room for scheduler in self._schedulers):
            may_prefill = self._prefill_is_due()
            batches = [scheduler.plan(now, may_prefill=may_prefill) for scheduler in self._schedulers]
            if not any(batches):
                return
            yield self._send(epoch, batches, now)

    def control(self, epoch: int, pace: StepPace, now: float) -> list[Step]:
        """Send a step by rank in which all of them compute dummies; all must have room."""
        nothing: list[ScheduledBatch | None] = [None] * len(self._schedulers)
        return self._send_as(epoch, nothing, pace, now, num_dummy_tokens=pace.num_tokens)

    def _prefill_is_due(self) -> bool:
        if not self._max_wait_steps:
            return True
        num_waiting = sum(bool(scheduler.num_waiting) for scheduler in self._schedulers)
        if not num_waiting:
            self._num_waited_steps = 0
            return True
        is_due = (
            num_waiting == len(self._schedulers)
            or self._num_waited_steps >= self._max_wait_steps
            or any(scheduler.is_prefilling for scheduler in self._schedulers)
            or any(scheduler.num_waiting and not scheduler.num_running for scheduler in self._schedulers)
        )
        self._num_waited_steps = 0 if is_due else self._num_waited_steps + 1
        return is_due

    def _send(self, epoch: int, batches: list[ScheduledBatch | None], now: float) -> list[Step]:
        is_decode = all(batch is None or batch.kind is StepKind.DECODE for batch in batches)
        kind = StepKind.DECODE if is_decode else StepKind.PREFILL
        most = max(1 if batch is None else batch.num_tokens for batch in batches)
        return self._send_as(epoch, batches, StepPace(kind, most), now)

    def _send_as(
        self, epoch: int, batches: list[ScheduledBatch | None], pace: StepPace, now: float, *, num_dummy_tokens: int = 1
    ) -> list[Step]:
        num_tokens = tuple(num_dummy_tokens if batch is None else batch.num_tokens for batch in batches)
        is_decode = pace.kind is StepKind.DECODE
        padded_size = graph_batch_size(pace.num_tokens, self._graph_sizes) if is_decode else 0
        steps = []
        for scheduler, batch in zip(self._schedulers, batches, strict=True):
            if batch is None:
                sent = scheduler.commit_dummy(now, pace, num_dummy_tokens)
            else:
                sent = scheduler.commit(batch, now, pace), batch
            steps.append(Step(epoch, *sent, num_tokens, padded_size))
        assert len({step.step_id for step in steps}) == 1, "coupled ranks are out of step"
        return steps
