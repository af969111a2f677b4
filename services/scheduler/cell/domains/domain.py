"""DP ranks and failure domains."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.cell.domains.lockstep import LockstepPlanner
from services.scheduler.cell.events import Action, SendStep
from services.scheduler.core.batch.step import Step, StepPace
from services.scheduler.core.policy import SchedulerPolicy, StepBudget
from services.scheduler.core.scheduler import RecoveredSequences, Scheduler
from services.scheduler.core.worker_facts import WorkerFacts
from shared.ids import DpRank
from shared.step.step import StepKind
from shared.wire import CONTROLS


@dataclass(slots=True, eq=False)
class Rank:
    """A DP rank: its scheduler, and what it last reported."""

    number: DpRank
    scheduler: Scheduler
    facts: WorkerFacts | None = None
    heard_at: float = 0.0
    progress: int | None = None


@dataclass(slots=True)
class Control:
    """Dummies that a domain computes before suspects are tried on it."""

    num_left: int
    """Steps that were not sent yet."""
    num_prompt_tokens: int
    """The tokens of the first step, a prefill; 0 once it was sent."""


class Domain:
    """Ranks that share an epoch: all coupled ranks, or a single one.

    Invariant: without an epoch its ranks hold no sequence and no step is in flight. While `is_held` or `is_ending`, no
    step is sent; while it has a control, only dummies are. It is vacant only without an epoch.
    """

    def __init__(self, number: int, ranks: list[Rank], policy: SchedulerPolicy, *, is_vacant: bool = False) -> None:
        self.number = number
        self.ranks = ranks
        self.is_vacant = is_vacant
        """Whether it is a place that no endpoint has; see `Places`."""
        self.is_withdrawn = False
        """Whether its endpoint is terminating or gone; across epochs."""
        self.epoch: int | None = None
        self.is_held = False
        self.control: Control | None = None
        """Steps that show that the workers can compute; from `Quarantine.advance` until it takes it back."""
        self.has_failed_control = False
        """Whether its last epoch ended while a dummy was computed as a control."""
        self.has_computed_nothing = False
        """Whether its last epoch was sent steps and returned none."""
        self._last_control_step = 0
        self.num_steps_of_last_epoch = 0
        """Steps sent in it, which has ended; the same for all ranks if there are several."""
        self.is_leaving = False
        """Whether its workers were asked to end; until the epoch ends."""
        self.is_drained_by_operator = False
        """Whether an operator wants no work on it; across epochs."""
        self.is_ending = False
        """Whether the epoch ends when the steps in flight have returned; see `Drains`."""
        self._policy = policy
        self._schedulers = [rank.scheduler for rank in ranks]
        self._planner = LockstepPlanner(self._schedulers, policy.max_prefill_wait_steps) if len(ranks) > 1 else None

    @property
    def is_draining(self) -> bool:
        """Whether it takes no new sequences."""
        return self.is_departing or self.is_drained_by_operator

    @property
    def is_departing(self) -> bool:
        """Whether its workers are about to end, or may be."""
        return self.is_leaving or self.is_withdrawn

    @property
    def is_quiet(self) -> bool:
        """Whether no step is in flight."""
        return all(scheduler.oldest_in_flight is None for scheduler in self._schedulers)

    @property
    def is_empty(self) -> bool:
        """Whether its ranks hold no sequence and no step is in flight."""
        return all(scheduler.is_empty for scheduler in self._schedulers)

    def begin_epoch(self, facts: tuple[WorkerFacts, ...], now: float) -> None:
        """Start an epoch: all groups have been attached under it."""
        self.epoch = facts[0].epoch
        self.is_held = False
        for rank, rank_facts in zip(self.ranks, facts, strict=True):
            rank.facts, rank.heard_at, rank.progress = rank_facts, now, None
            rank.scheduler.begin_epoch(rank_facts)
        if self._planner is not None:
            self._planner.begin_epoch(facts)

    def end_epoch(self, now: float) -> list[RecoveredSequences]:
        """End the epoch; returns the sequences that the ranks had."""
        self.epoch = None
        self.is_held = self.is_leaving = False
        self.num_steps_of_last_epoch = self._schedulers[0].last_sent_step_id
        is_newest = 0 < self._last_control_step == self.num_steps_of_last_epoch
        self.has_failed_control = is_newest and self.num_returned_steps < self._last_control_step
        self.has_computed_nothing = self.num_steps_of_last_epoch > 0 == self.num_returned_steps
        self._last_control_step = 0
        return [scheduler.end_epoch(now) for scheduler in self._schedulers]

    @property
    def num_returned_steps(self) -> int:
        """Steps of this epoch that have returned; of all ranks if there are several."""
        return min(scheduler.last_returned_step_id for scheduler in self._schedulers)

    @property
    def has_controls(self) -> bool:
        """Whether its workers compute dummies of any size."""
        facts = [rank.facts for rank in self.ranks]
        return all(each is not None and CONTROLS in each.introduction.capabilities for each in facts)

    def vacate(self) -> None:
        """Forget the endpoint of an unattached place."""
        self.is_vacant, self.is_withdrawn, self.is_drained_by_operator = True, False, False
        for rank in self.ranks:
            rank.facts = None

    def set_depth(self, max_steps_in_flight: int) -> None:
        """Limit how many steps are sent ahead."""
        for scheduler in self._schedulers:
            scheduler.max_steps_in_flight = max_steps_in_flight

    def send_ahead(self, now: float) -> list[Action]:
        """Send the steps for which there is work and room."""
        if self.epoch is None or self.is_held or self.is_ending:
            return []
        if self.control is not None:
            return self._send_control(self.epoch, self.control, now)
        if self._planner is not None:
            return [
                SendStep(rank.number, step)
                for steps in self._planner.steps(self.epoch, now)
                for rank, step in zip(self.ranks, steps, strict=True)
            ]
        actions: list[Action] = []
        number, schedule = self.ranks[0].number, self._schedulers[0].schedule
        while (scheduled := schedule(now)) is not None:
            actions.append(SendStep(number, Step(self.epoch, *scheduled)))
        return actions

    def _send_control(self, epoch: int, control: Control, now: float) -> list[Action]:
        if not control.num_left or not self.is_quiet:
            return []
        control.num_left -= 1
        pace = StepPace(StepKind.DECODE, 1)
        if control.num_prompt_tokens:
            # First as much as the suspects' prompts, up to what a step may have.
            most = min(self._most_prompt_tokens(rank.facts) for rank in self.ranks if rank.facts is not None)
            pace = StepPace(StepKind.PREFILL, min(control.num_prompt_tokens, most))
            control.num_prompt_tokens = 0
        if self._planner is not None:
            steps = self._planner.control(epoch, pace, now)
        else:
            steps = [Step(epoch, *self._schedulers[0].commit_dummy(now, pace, pace.num_tokens))]
        self._last_control_step = steps[0].step_id
        return [SendStep(rank.number, step) for rank, step in zip(self.ranks, steps, strict=True)]

    def _most_prompt_tokens(self, facts: WorkerFacts) -> int:
        return min(StepBudget.of(self._policy, facts).max_prompt_tokens, facts.context_length)

    def find_fault(self, now: float) -> str | None:
        """Say why the domain must be given up; None when all is well."""
        if self.epoch is None:
            return None
        for rank in self.ranks:
            if now - rank.heard_at > self._policy.worker_silence_s:
                return f"rank {rank.number} is silent"
            deadline = rank.scheduler.step_deadline.time
            if deadline is not None and now >= deadline:
                return f"rank {rank.number} neither answers a step nor makes progress"
        return None

    def extend_deadlines(self, pause_s: float, now: float) -> None:
        """Ignore the last `pause_s` seconds, when this process was not listening."""
        for rank in self.ranks:
            rank.heard_at = min(now, rank.heard_at + pause_s)
            rank.scheduler.step_deadline.extend(pause_s, now)
