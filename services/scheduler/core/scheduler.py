"""Which sequences the next step computes: prefill first, on paged KV blocks, with preemption.

Sans-I/O: no clock but the `now` it is passed. The names and the order of decisions follow ATOM's scheduler and
nano-vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.core.admission import NewTokenRatio
from services.scheduler.core.assemble import assemble, dummy_batch
from services.scheduler.core.batch.sequence import Finish, Numerics, Sequence, SequenceStatus
from services.scheduler.core.batch.step import (
    OutputsByClient,
    RequestEnd,
    ScheduledBatch,
    StepCounts,
    StepKind,
    StepPace,
    StepRecord,
    StepResult,
)
from services.scheduler.core.cache.block_manager import BlockCounts, BlockManager
from services.scheduler.core.decode import DecodePlanner, Decodes
from services.scheduler.core.endings import Endings
from services.scheduler.core.policy import CacheSettings, SchedulerCounters, SchedulerPolicy
from services.scheduler.core.postprocess import Postprocessor
from services.scheduler.core.preemption import Preemption
from services.scheduler.core.prefill import Prefill, PrefillPlanner
from services.scheduler.core.queue.waiting_queue import QueuePolicy, WaitingQueue
from services.scheduler.core.running_batch import RunningBatch
from services.scheduler.core.step_budget import StepBudget
from services.scheduler.core.step_deadline import StepDeadline
from services.scheduler.core.validate_result import validate_result
from services.scheduler.core.worker_facts import WorkerFacts

# Nothing is ever added to it.
_NO_PREFILL = Prefill()
_NO_WORKER = WorkerFacts(0, "", 0, 0, (), 0)


@dataclass(frozen=True, slots=True)
class RecoveredSequences:
    """The sequences that a rank had when its epoch ended. They are on no rank and in no queue any more."""

    sequences: list[Sequence]
    """All of them, in the order in which they are to wait."""
    computed: list[Sequence]
    """Those whose KV was lost."""
    in_flight: list[str]
    """The ids of the requests in steps that had not returned, in the order of the rows."""


class Scheduler:
    """The waiting and running sequences of one DP rank.

    A step goes through three methods: `schedule` plans it and commits to it, the worker computes it, `postprocess`
    takes its result in. (Coupled ranks call `plan` and `commit` one after the other, with a look at each other between
    them.) `add` puts a sequence in the queue; `abort`, `finish` and `stop_at` end it, wherever it is.

    Steps are sent ahead of their predecessors' results: a sequence then has a placeholder for each token that is on
    its way, and the worker feeds each step from the tokens it sampled itself.

        step 7   scheduled ─── computed ─── postprocessed
        step 8          scheduled ───────── computed ─── postprocessed       two steps in flight

    A rank's group is held for an epoch. When the epoch ends, everything but the sequences and their tokens is void.

    Invariant: a running sequence has a slot and the blocks of all tokens that were computed or are in flight, of its
    whole prompt from its first chunk on; a waiting one has neither, unless it is parked: it was preempted, and a
    step in flight still names it.
    """

    def __init__(self, policy: SchedulerPolicy, cache: CacheSettings, counters: SchedulerCounters) -> None:
        self.counters = counters
        self.num_steps = StepCounts()
        self._waiting = WaitingQueue(
            policy.queue_policy, policy.max_age_s, policy.max_waiting_requests, policy.max_waiting_tokens
        )
        self.max_steps_in_flight = policy.max_steps_in_flight
        self._policy = policy
        self._cache = cache
        self._new_token_ratio = NewTokenRatio()
        self.begin_epoch(_NO_WORKER)

    def begin_epoch(self, facts: WorkerFacts) -> None:
        """Start anew with a worker's empty pool and no step sent; nothing runs."""
        self._budget = StepBudget.of(self._policy, facts)
        self._blocks = BlockManager(
            facts.num_blocks, self._cache.block_size, enable_prefix_caching=self._cache.enable_prefix_caching
        )
        self._running = RunningBatch(self._policy.max_num_seqs, self._blocks, facts.num_draft_tokens)
        self._preemption = Preemption(self._policy, self._waiting, self._running, self._new_token_ratio, self.counters)
        self._prefill = PrefillPlanner(
            self._policy, self._waiting, self._running, self._new_token_ratio, facts, self.counters
        )
        self._decode = DecodePlanner(self._running, self._preemption)
        self._step_deadline = StepDeadline(self._running.in_flight)
        self._numerics = Numerics(facts.numerics_fingerprint, facts.is_exact)
        self._endings = Endings(self._waiting, self._running, self._preemption, facts, self.counters)
        self._postprocessor = Postprocessor(
            self._running, self._preemption, self._step_deadline, endings=self._endings, counters=self.counters
        )

    def end_epoch(self, now: float) -> RecoveredSequences:
        """The group is lost: void its steps, and give all sequences back with the tokens they have."""
        in_flight = self._running.in_flight_ids()
        computed = self._running.void()
        for seq in computed:
            seq.num_resumes += 1
            seq.numerics = self._numerics if seq.numerics is None else seq.numerics.joined_with(self._numerics)
        waiting = self._take_waiting(now)
        self.begin_epoch(_NO_WORKER)
        return RecoveredSequences([*computed, *waiting], computed, in_flight)

    def take_all(self, now: float) -> list[Sequence]:
        """Give all sequences back, with the tokens they have; no step is in flight.

        What was computed of them stays in the prefix cache until their blocks are reused.
        """
        assert not self._running.in_flight
        for seq in self._running.sequences():
            self._preemption.preempt(seq, now)
        return self._take_waiting(now)

    @property
    def is_empty(self) -> bool:
        """Whether nobody runs, waits or is in a step in flight."""
        return not self.num_running and not self._waiting and not self._running.in_flight

    @property
    def is_prefilling(self) -> bool:
        """Whether a prompt has begun that is not sent completely."""
        return bool(self._running.begun)

    @property
    def has_room(self) -> bool:
        """Whether one more step may be in flight."""
        return len(self._running.in_flight) < self.max_steps_in_flight

    @property
    def queue(self) -> WaitingQueue:
        """The waiting queue, for the bounds that hold for all queues of a cell together."""
        return self._waiting

    @property
    def block_counts(self) -> BlockCounts:
        """How many KV blocks there are, and what they are used for."""
        return self._blocks.counts

    @property
    def num_waiting(self) -> int:
        """Sequences in the waiting queue."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the waiting sequences that were never admitted."""
        return self._waiting.num_new_tokens

    @property
    def num_running(self) -> int:
        """Sequences that get rows."""
        return len(self._running.order)

    @property
    def oldest_in_flight(self) -> StepRecord | None:
        """The step whose result comes next; None when none is in flight."""
        return self._running.in_flight[0] if self._running.in_flight else None

    @property
    def last_returned_step_id(self) -> int:
        """The last step of the epoch that has returned; 0 when none has."""
        return self._running.last_returned_step_id

    @property
    def step_deadline(self) -> float | None:
        """When the rank counts as hung, unless it gets on; None when no step is in flight."""
        return self._step_deadline.time

    def on_progress(self, now: float) -> None:
        """Note that the rank's device gets on."""
        self._step_deadline.on_progress(now)

    def extend_deadlines(self, pause_s: float, now: float) -> None:
        """Leave out of account the last `pause_s` seconds, in which this process did not listen to the rank."""
        self._step_deadline.extend(pause_s, now)

    def sequences_in(self, record: StepRecord) -> list[Sequence]:
        """The sequences in a step in flight, those that ended meanwhile too."""
        return self._running.sequences_in(record)

    def num_cached_tokens(self, seq: Sequence) -> int:
        """How many tokens of a waiting sequence need not be computed here."""
        return 0 if seq.wants_prompt_logprobs else self._blocks.num_cached_tokens(seq)

    def add(self, seq: Sequence, now: float) -> None:
        """Put a sequence in the waiting queue."""
        self._waiting.add(seq, now)

    def withdraw(self, seq: Sequence, now: float) -> None:
        """Take a sequence out of the waiting queue: it is to wait elsewhere."""
        self._waiting.remove(seq, now)

    def schedule(self, now: float) -> tuple[int, ScheduledBatch] | None:
        """Plan and commit the next step.

        Returns:
            The step's id and its plan; its record is in flight from then on. None when there is nothing to do, or
            as many steps are in flight as may be.
        """
        batch = self.plan(now) if self.has_room else None
        return None if batch is None else (self.commit(batch, now), batch)

    def plan(self, now: float, *, may_prefill: bool = True) -> ScheduledBatch | None:
        """Plan the next step: a prefill when the gate is open and one fits, else a decode of all that run.

        With mixed steps, decodes join a prefill, which gets what they leave of the budget (see `StepBudget`). The plan
        must be committed before anything else happens.

        Args:
            now: The time.
            may_prefill: Whether waiting sequences may enter; prompts that have begun go on in any case.

        Returns:
            None, and nothing but preemptions has happened, when there is nothing to do.
        """
        if may_prefill:
            self._make_way(now)
        if self._budget.mixes:
            decodes = self._decode.plan(now)
            prefill = self._plan_prefill(self._budget.left_by(len(decodes.rows)), may_prefill, now)
        else:
            prefill = self._plan_prefill(self._budget.max_prompt_tokens, may_prefill, now)
            decodes = self._decode.plan(now) if prefill.is_empty else Decodes()
        if not decodes.rows.size and prefill.is_empty:
            return None
        return assemble(self._running.take_leave_slots(), decodes, prefill)

    def commit(self, batch: ScheduledBatch, now: float, pace: StepPace | None = None) -> int:
        """Note that a step is in flight; returns its id.

        Args:
            batch: What `plan` just returned.
            now: The time.
            pace: Of the step on the rank that the others wait for; that of the batch when absent.
        """
        self.num_steps.add(batch)
        if batch.kind is not StepKind.PREFILL:
            self._new_token_ratio.on_decode_step()
        return self._running.commit(batch, now, pace)

    def commit_dummy(self, now: float, pace: StepPace) -> tuple[int, ScheduledBatch]:
        """Commit a step that computes nothing for any sequence: the collectives of other ranks wait for this one."""
        batch = dummy_batch(pace.kind, self._running.take_leave_slots())
        self.num_steps.add(batch)
        return self._running.commit(batch, now, pace), batch

    def validate_result(self, result: StepResult, logits_width: int) -> str | None:
        """Find out why a result cannot be an answer to the oldest step in flight; returns None when it can."""
        record = self.oldest_in_flight
        if record is None or result.step_id != record.step_id:
            return f"result of step {result.step_id}, which is not the next"
        return validate_result(result, record, self._running.slots, logits_width)

    def postprocess(self, result: StepResult, now: float) -> OutputsByClient:
        """Take in a valid result of the oldest step in flight; see `Postprocessor.postprocess`."""
        return self._postprocessor.postprocess(result, now)

    def abort(self, seq: Sequence, now: float) -> None:
        """Forget a sequence; its blocks are free once its steps in flight have returned."""
        self._endings.abort(seq, now)

    def finish(self, seq: Sequence, finish: Finish, now: float) -> RequestEnd:
        """End a sequence whose tokens are stored, with all its completion tokens."""
        return self._endings.finish(seq, finish, now)

    def stop_at(self, seq: Sequence, num_completion_tokens: int, now: float) -> RequestEnd:
        """End a sequence at a stop string that was found in its text; tokens after it do not count."""
        return self._endings.stop_at(seq, num_completion_tokens, now)

    def flush_prefix_cache(self) -> int:
        """Forget every cached prefix; returns the number of blocks that held one."""
        return self._blocks.flush()

    def waiting_sequences(self) -> list[Sequence]:
        """The sequences in the waiting queue, in the order in which they were added."""
        return list(self._waiting)

    def unfinished(self) -> list[Sequence]:
        """The sequences that have not ended, wherever they are."""
        held = [*self._running.sequences(), *self._running.retiring()]
        return [*self._waiting, *(seq for seq in held if seq.leave_time is None)]

    def check_integrity(self) -> None:
        """Assert that slots, blocks and queues agree."""
        assert all(seq.status is SequenceStatus.WAITING for seq in self._waiting), "a waiting sequence's status"
        assert all(not seq.block_table and seq.slot is None for seq in self._waiting), "a waiting sequence holds blocks"
        self._waiting.check_integrity()
        self._preemption.check_integrity()
        self._running.check_integrity()

    def _make_way(self, now: float) -> None:
        """Let lower classes give way to the next waiting sequence, where the queue goes by priority."""
        if self._policy.queue_policy is QueuePolicy.PRIORITY and self._waiting and self._may_admit(now):
            seq, num_blocks = self._prefill.next_waiting(now)
            self._preemption.make_way(seq, num_blocks, now)

    def _plan_prefill(self, budget: int, may_admit: bool, now: float) -> Prefill:
        if not self._waiting and not self._running.begun:
            return _NO_PREFILL
        return self._prefill.plan(budget, now, may_admit=may_admit and self._may_admit(now))

    def _may_admit(self, now: float) -> bool:
        # A parked sequence goes to the queue when its steps return: nobody overtakes it.
        return not self._preemption.num_parked and self._gate_is_open(now)

    def _gate_is_open(self, now: float) -> bool:
        """The delay gate: with a factor, a prefill waits a while so that more prompts share it."""
        if not self._policy.delay_factor or not self.num_running or not self._waiting:
            return True
        waited = now - self._waiting.oldest_arrive_time()
        return waited > self._policy.delay_factor * self._postprocessor.last_prefill_latency

    def _take_waiting(self, now: float) -> list[Sequence]:
        """Take everybody out of the waiting queue."""
        waiting = list(self._waiting)
        for seq in waiting:
            self._waiting.remove(seq, now)
        return waiting
