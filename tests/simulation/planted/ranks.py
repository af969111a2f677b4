"""Bugs in DP ranks, their epochs and their suspects that the simulation must detect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from services.scheduler.cell.cell import Cell
from services.scheduler.cell.domains.domain import Domain, Rank
from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import Action, SendStep
from services.scheduler.cell.heartbeat import Heartbeat
from services.scheduler.cell.quarantine.quarantine import Quarantine
from services.scheduler.cell.quarantine.suspects import Suspects
from services.scheduler.core.batch.step import StepPace
from services.scheduler.core.results.outputs import OutputsByClient
from services.scheduler.core.scheduler import RecoveredSequences, Scheduler
from services.scheduler.core.step_deadline import StepDeadline
from services.worker.batch.step_input import StepInput
from shared.bisection import Bisection
from shared.step.step import StepKind
from tests.simulation.faults import Fault
from tests.simulation.planted.planting import Patch, PlantedBug, planter

RANK_BUGS: list[PlantedBug] = []
_planted = planter(RANK_BUGS)


# Lockstep.


@_planted(seed=2)
def _idle_ranks_get_no_dummy(patch: Patch) -> None:
    """A coupled rank without work gets no dummy step to match another rank's decode."""
    send_ahead = Domain.send_ahead

    def send_work(self: Domain, now: float) -> list[Action]:
        actions = send_ahead(self, now)
        return [action for action in actions if not (isinstance(action, SendStep) and action.step.batch.is_dummy)]

    patch.setattr(Domain, "send_ahead", send_work)


@_planted(seed=2)
def _dummies_are_of_another_kind(patch: Patch) -> None:
    """Idle ranks run a dummy prefill while the others decode."""
    commit_dummy = Scheduler.commit_dummy
    prefill = StepPace(StepKind.PREFILL, 1)
    patch.setattr(Scheduler, "commit_dummy", lambda self, now, *_: commit_dummy(self, now, prefill))


@_planted(seed=2)
def _dummies_are_not_counted(patch: Patch) -> None:
    """Steps count 0 tokens for a dummy, so collectives have no room for its one token."""
    send_ahead = Domain.send_ahead

    def send_uncounted(self: Domain, now: float) -> list[Action]:
        return [
            replace(action, step=replace(action.step, num_tokens_across_dp=_work_of(action)))
            if isinstance(action, SendStep) and action.step.batch.is_dummy
            else action
            for action in send_ahead(self, now)
        ]

    patch.setattr(Domain, "send_ahead", send_uncounted)


def _work_of(action: SendStep) -> tuple[int, ...]:
    num_tokens = action.step.num_tokens_across_dp
    return tuple(0 if rank == action.rank else number for rank, number in enumerate(num_tokens))


@_planted(seed=2)
def _dummies_write_kv(patch: Patch) -> None:
    """A dummy writes its KV into a slot that belongs to a sequence."""
    dummy = StepInput.dummy

    def write(num_tokens: int, num_blocks: int, **others: Any) -> StepInput:
        made = dummy(num_tokens, num_blocks, **others)
        return replace(made, arrays=made.arrays | {"slot_mapping": np.zeros(num_tokens, np.int64)})

    patch.setattr(StepInput, "dummy", write)


@_planted()
def _ranks_go_on_one_by_one(patch: Patch) -> None:
    """A coupled rank that has room gets a step although the others have none."""
    patch.setattr(Scheduler, "has_room", True)


@_planted(Fault.STEP_LOST, Fault.LINK_BREAK, seed=12)
def _ranks_that_are_out_of_step_are_attached(patch: Patch) -> None:
    """Coupled groups continue although one of them waits in a step that the others never received."""
    patch.setattr("services.scheduler.cell.domains.attach._find_reason_to_restart", lambda _: None)


# Lost ranks.


@_planted(Fault.WORKER_CRASH)
def _sequences_of_a_lost_rank_are_forgotten(patch: Patch) -> None:
    """Sequences that were computed on a lost rank are not requeued on the others."""
    end_epoch = Scheduler.end_epoch

    def forget(self: Scheduler, now: float) -> RecoveredSequences:
        recovered = end_epoch(self, now)
        lost = set(recovered.computed)
        return replace(recovered, sequences=[seq for seq in recovered.sequences if seq not in lost])

    patch.setattr(Scheduler, "end_epoch", forget)


@_planted(Fault.WORKER_CRASH)
def _sequences_of_a_lost_rank_go_to_the_back(patch: Patch) -> None:
    """Sequences of a lost rank are queued elsewhere as if they had just arrived."""
    end_epoch = Scheduler.end_epoch

    def requeue(self: Scheduler, now: float) -> RecoveredSequences:
        recovered = end_epoch(self, now)
        for seq in recovered.sequences:
            seq.arrived_at = now
        return recovered

    patch.setattr(Scheduler, "end_epoch", requeue)


@_planted(Fault.RESULT_LATE, Fault.LINK_BREAK)
def _results_count_for_another_rank(patch: Patch) -> None:
    """A rank's result is taken for its neighbour's."""
    on_step_returned = Engine._on_step_returned
    patch.setattr(
        Engine,
        "_on_step_returned",
        lambda self, rank, *args: on_step_returned(self, (rank + 1) % len(self._cell.ranks), *args),
    )


@_planted(Fault.LONG_STEP)
def _progress_does_not_count(patch: Patch) -> None:
    """A step that is merely long is taken for a hang."""
    patch.setattr(StepDeadline, "on_progress", lambda *_: None)


@_planted(Fault.SCHEDULER_STOP, seed=17)
def _the_lease_is_not_looked_at(patch: Patch) -> None:
    """A scheduler that was stopped for long continues although its lease has run out."""
    patch.setattr(Heartbeat, "is_lease_over", lambda *_: False)


# Suspects.


@_planted(Fault.WORKER_CRASH, Fault.POISON)
def _a_prefill_clears(patch: Patch) -> None:
    """Suspects are cleared by a prefill instead of a decode."""
    postprocess = Cell.postprocess

    def clear(self: Cell, rank: Rank, *args: Any) -> OutputsByClient:
        domain = self.domain_by_rank[rank.number]
        record = rank.scheduler.oldest_in_flight
        assert record is not None
        requests = {seq.key for seq in rank.scheduler.sequences_in(record)}
        outputs = postprocess(self, rank, *args)
        if self._quarantine.is_on(domain):
            self._quarantine.suspects.clear(domain.number, requests)
        return outputs

    patch.setattr(Cell, "postprocess", clear)


@_planted(Fault.WORKER_CRASH)
def _suspects_are_not_halved(patch: Patch) -> None:
    """All suspects of a crash are tried together."""
    crash = Bisection[str].crash

    def put_all_back(self: Bisection[str], suspects: Sequence[str], now: float) -> str | None:
        if len(suspects) < 2:
            return crash(self, suspects, now)
        self.put_back(list(suspects), now)
        return None

    patch.setattr(Bisection, "crash", put_all_back)


@_planted(Fault.WORKER_CRASH)
def _suspects_are_tried_beside_others(patch: Patch) -> None:
    """A domain with a trial admits other requests."""
    patch.setattr(
        Quarantine,
        "open_ranks",
        lambda self: [rank for domain in self._domains if domain.epoch is not None for rank in domain.ranks],
    )


@_planted(Fault.WORKER_CRASH)
def _trials_are_sent_ahead(patch: Patch) -> None:
    """Suspects are tried with several steps in flight."""
    patch.setattr("services.scheduler.cell.quarantine.quarantine.TRIAL_DEPTH", 4)


@_planted(Fault.WORKER_SICK)
def _suspects_are_tried_without_a_control(patch: Patch) -> None:
    """Nothing shows that a worker can compute at all before it is given suspects."""
    patch.setattr(Domain, "has_controls", False)


@_planted(Fault.WORKER_SICK, seed=5)
def _a_failed_control_acquits_nobody(patch: Patch) -> None:
    """A worker's failed control clears no suspect, so that its requests wait for another one."""
    patch.setattr(Suspects, "acquit", lambda *_: None)


@_planted(Fault.WORKER_SICK, seed=3)
def _controls_are_shorter_than_what_crashed(patch: Patch) -> None:
    """A worker that dies of its third step passes a control of one step, and each trial is its third."""
    patch.setattr("services.scheduler.cell.quarantine.quarantine._FEWEST_CONTROL_STEPS", 1)
    patch.setattr("services.scheduler.cell.quarantine.quarantine._MOST_CONTROL_STEPS", 0)


@_planted(Fault.WORKER_CRASH, Fault.POISON, seed=2)
def _crashes_of_others_count(patch: Patch) -> None:
    """A request counts as poison after two crashed steps, even if it was not alone in them."""
    crash = Bisection[str].crash

    def count_each(self: Bisection[str], suspects: Sequence[str], now: float) -> str | None:
        self._num_crashes_alone.update(suspects[1:])
        return crash(self, suspects, now)

    patch.setattr(Bisection, "crash", count_each)
