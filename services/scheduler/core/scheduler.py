"""Decides which sequences the next step computes.

Sans-I/O. Names and the order of decisions follow ATOM's scheduler and nano-vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.core.admission import NewTokenRatio
from services.scheduler.core.batch.sequence import TOKEN_BYTES, Finish, Numerics, RequestKey, Sequence, SequenceStatus
from services.scheduler.core.batch.step import ScheduledBatch, StepCounts, StepPace, StepRecord
from services.scheduler.core.block_manager import BlockCounts, BlockManager
from services.scheduler.core.cache.kv_feed import KvFeed
from services.scheduler.core.cache.state_checkpoints import CheckpointCounts
from services.scheduler.core.planning.assemble import assemble, dummy_batch
from services.scheduler.core.planning.decode import DecodePlanner, Decodes
from services.scheduler.core.planning.kept_room import KeptRoom
from services.scheduler.core.planning.preemption import Preemption
from services.scheduler.core.planning.prefill import Prefill, PrefillPlanner
from services.scheduler.core.planning.shares import Shares
from services.scheduler.core.policy import CacheSettings, SchedulerCounters, SchedulerPolicy, StepBudget
from services.scheduler.core.queue.tenant_counters import TenantCounters
from services.scheduler.core.queue.waiting_queue import QueuePolicy, WaitingQueue
from services.scheduler.core.results.endings import Endings
from services.scheduler.core.results.outputs import OutputsByClient, RequestEnd
from services.scheduler.core.results.postprocess import Postprocessor
from services.scheduler.core.results.validate_result import validate_result
from services.scheduler.core.running_batch import RunningBatch
from services.scheduler.core.state_saves import StateSaves
from services.scheduler.core.step_deadline import StepDeadline
from services.scheduler.core.worker_facts import WorkerFacts
from shared.step.step import StepKind, StepResult

# Shared and empty; never modified.
_NO_PREFILL = Prefill()
_NO_WORKER = WorkerFacts(0, "", 0, 0, (), 0)


@dataclass(frozen=True, slots=True)
class RecoveredSequences:
    """What a rank held when its epoch ended."""

    sequences: list[Sequence]
    """In the order in which they should wait."""
    computed: list[Sequence]
    """Sequences whose KV was lost."""
    in_flight: list[RequestKey]
    """Ids of the requests in flight, in row order."""


class Scheduler:
    """The waiting and running sequences of one DP rank.

    `schedule` plans and commits a step, the worker computes it, and `postprocess` takes in its result. (The plans of
    coupled ranks are combined between `plan` and `commit`.) `abort`, `finish` and `stop_at` end a sequence in any
    state.

    A step is sent before its predecessor's result has arrived. A sequence then has a placeholder for each token in
    flight, and the worker feeds each step from the tokens it sampled.

        step 7   scheduled ─── computed ─── postprocessed
        step 8          scheduled ───────── computed ─── postprocessed       two steps in flight

    When an epoch ends, only the sequences and their tokens survive.

    Invariant: a running sequence has a slot and the blocks of all tokens that are computed or in flight, and of its
    whole prompt from its first chunk on. A waiting sequence has neither, unless it is parked (see `Preemption`).
    """

    def __init__(
        self,
        policy: SchedulerPolicy,
        cache: CacheSettings,
        counters: SchedulerCounters,
        tenants: TenantCounters | None = None,
    ) -> None:
        """Make a scheduler without a worker; `tenants` are those of the cell."""
        self.counters = counters
        self.num_steps = StepCounts()
        self._waiting = WaitingQueue(policy.queue_policy, policy.max_age_s, tenants)
        self.max_steps_in_flight = policy.max_steps_in_flight
        self._policy = policy
        self._has_classes = policy.queue_policy is QueuePolicy.PRIORITY
        self._cache = cache
        self._new_token_ratio = NewTokenRatio()
        self._kv_feed: KvFeed | None = None
        self.begin_epoch(_NO_WORKER)

    def add(self, seq: Sequence, now: float) -> None:
        """Queue a sequence."""
        self._waiting.add(seq, now)

    def schedule(self, now: float) -> tuple[int, ScheduledBatch] | None:
        """Plan and commit the next step; None when there is nothing to do, or no room in flight."""
        batch = self.plan(now) if self.has_room else None
        return None if batch is None else (self.commit(batch, now), batch)

    def plan(self, now: float, *, may_prefill: bool = True) -> ScheduledBatch | None:
        """Plan the next step: a prefill when the gate is open and one fits, else a decode of all running sequences.

        With mixed steps, a prefill gets what the decodes leave of the budget. The plan must be committed before
        anything else happens.

        Args:
            may_prefill: Whether waiting sequences may enter. Prompts that have begun continue in any case.

        Returns:
            None when there is nothing to do; only preemptions may have happened then.
        """
        self._shares.holdings = None
        if self._running.states is not None:
            self._prefill.bring_back(now)
        if may_prefill and self._waiting.num_next and (self._has_classes or self._waiting.tenants.are_shared):
            self._prefill.choose_again()
            self._preempt_for_next(now)
        if self._budget.mixes:
            decodes = self._plan_decodes(now)
            prefill = self._plan_prefill(self._budget.prompt_tokens_beside(len(decodes.rows)), may_prefill, now)
        else:
            prefill = self._plan_prefill(self._budget.max_prompt_tokens, may_prefill, now)
            decodes = self._plan_decodes(now) if prefill.is_empty else Decodes()
        if not decodes.rows.size and prefill.is_empty:
            return None
        batch = assemble(self._running.take_leave_slots(), decodes, prefill)
        if self._running.states is not None:
            self._running.states.add_records(batch, self._running.slots)
        return batch

    def commit(self, batch: ScheduledBatch, now: float, pace: StepPace | None = None) -> int:
        """Record a step in flight; returns its id.

        `batch` is what `plan` just returned. `pace` is that of the slowest coupled rank, by default that of `batch`.
        """
        self.num_steps.add(batch)
        if batch.kind is not StepKind.PREFILL:
            self._new_token_ratio.on_decode_step()
        return self._running.commit(batch, now, pace)

    def commit_dummy(self, now: float, pace: StepPace, num_tokens: int = 1) -> tuple[int, ScheduledBatch]:
        """Commit a step without sequences, for other ranks' collectives or as a control."""
        batch = dummy_batch(pace.kind, self._running.take_leave_slots(), num_tokens)
        self.num_steps.add(batch)
        return self._running.commit(batch, now, pace), batch

    def validate_result(self, result: StepResult, logits_width: int) -> str | None:
        """Say why a result cannot be that of the oldest step in flight; None when it can."""
        record = self.oldest_in_flight
        if record is None or result.step_id != record.step_id:
            return f"result of step {result.step_id}, which is not the next one expected"
        return validate_result(result, record, self._running.slots, logits_width)

    def postprocess(self, result: StepResult, now: float) -> OutputsByClient:
        """Take in a valid result; see `Postprocessor.postprocess`."""
        return self._postprocessor.postprocess(result, now)

    def abort(self, seq: Sequence, now: float) -> None:
        """Discard a sequence, wherever it is."""
        self._endings.abort(seq, now)

    def finish(self, seq: Sequence, finish: Finish, now: float) -> RequestEnd:
        """End a sequence with all its completion tokens, which must be stored."""
        return self._endings.finish(seq, finish, now)

    def stop_at(self, seq: Sequence, num_completion_tokens: int, now: float) -> RequestEnd:
        """End a sequence at a stop string; later tokens are discarded."""
        return self._endings.stop_at(seq, num_completion_tokens, now)

    def withdraw(self, seq: Sequence, now: float) -> None:
        """Take a sequence out of the waiting queue, to wait elsewhere."""
        self._waiting.remove(seq, now)

    def begin_epoch(self, facts: WorkerFacts) -> None:
        """Start over with a worker's empty block pool; nothing may be running."""
        self._budget = StepBudget.of(self._policy, facts)
        caches_prefixes = self._cache.enable_prefix_caching and facts.may_share_prefixes
        saves_states = caches_prefixes and facts.has_recurrent_state
        self._blocks = BlockManager(
            facts.num_blocks,
            self._cache.block_size,
            enable_prefix_caching=caches_prefixes,
            kv_feed=self._kv_feed,
            num_checkpoints=facts.num_checkpoint_slots if saves_states else None,
        )
        num_slots = self._policy.max_num_seqs
        if facts.max_num_seqs is not None:
            num_slots = min(num_slots, facts.max_num_seqs)
        states = None
        if saves_states:
            states = StateSaves(
                self._blocks,
                self._cache,
                num_slots=num_slots,
                may_cut=self._policy.enable_chunked_prefill,
                has_drafts=facts.num_draft_tokens > 0,
            )
        self._running = RunningBatch(num_slots, self._blocks, facts.num_draft_tokens, states)
        self._shares = Shares(num_slots, self._waiting, self._running)
        self._preemption = Preemption(
            self._policy, self._waiting, self._running, self._shares, self._new_token_ratio, self.counters
        )
        self._prefill = PrefillPlanner(
            self._policy, self._running, self._shares, self._new_token_ratio, facts, self.counters
        )
        kept_room = KeptRoom(self._waiting, self._running, self._prefill.num_blocks_to_take)
        self._decode = DecodePlanner(self._running, self._preemption, kept_room)
        self.step_deadline = StepDeadline(self._running.in_flight)
        self._numerics = Numerics(facts.numerics_fingerprint, facts.is_exact)
        self._endings = Endings(self._waiting, self._running, self._preemption, facts, self.counters)
        self._postprocessor = Postprocessor(
            self._running,
            self._preemption,
            self.step_deadline,
            endings=self._endings,
            tenants=self._waiting.tenants,
            counters=self.counters,
        )

    def end_epoch(self, now: float) -> RecoveredSequences:
        """Void the steps of a lost group; returns all sequences, with their tokens."""
        in_flight = self._running.in_flight_keys()
        computed = self._running.void()
        for seq in computed:
            seq.num_resumes += 1
            seq.pays_again = False
            seq.numerics = self._numerics if seq.numerics is None else seq.numerics.joined_with(self._numerics)
        waiting = self._take_waiting(now)
        self.begin_epoch(_NO_WORKER)
        return RecoveredSequences([*computed, *waiting], computed, in_flight)

    def take_all(self, now: float) -> list[Sequence]:
        """Take all sequences, with their tokens; no step may be in flight.

        Their computed blocks stay in the prefix cache.
        """
        assert not self._running.in_flight
        for seq in self._running.sequences():
            self._preemption.preempt(seq, now)
        return self._take_waiting(now)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is running, waiting or in flight."""
        return not self.num_running and not self._waiting and not self._running.in_flight

    @property
    def is_prefilling(self) -> bool:
        """Whether any prompt has been sent only in part."""
        return bool(self._running.begun)

    @property
    def has_room(self) -> bool:
        """Whether one more step may be in flight."""
        return len(self._running.in_flight) < self.max_steps_in_flight

    @property
    def queue(self) -> WaitingQueue:
        """The waiting queue, for the limits of a whole cell."""
        return self._waiting

    @property
    def block_counts(self) -> BlockCounts:
        """KV blocks by use."""
        return self._blocks.counts

    @property
    def checkpoint_counts(self) -> CheckpointCounts:
        """Saved recurrent states by use."""
        return self._blocks.checkpoint_counts

    @property
    def num_waiting(self) -> int:
        """Waiting sequences."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of waiting sequences that were never admitted."""
        return self._waiting.num_new_tokens

    @property
    def num_running(self) -> int:
        """Running sequences."""
        return len(self._running.order)

    @property
    def oldest_in_flight(self) -> StepRecord | None:
        """The step whose result comes next, if any."""
        return self._running.in_flight[0] if self._running.in_flight else None

    @property
    def last_returned_step_id(self) -> int:
        """The last step of this epoch whose result has come; 0 for none."""
        return self._running.last_returned_step_id

    @property
    def last_sent_step_id(self) -> int:
        """The last step of this epoch that was sent; 0 for none."""
        return self._running.last_sent_step_id

    def sequences_in(self, record: StepRecord) -> list[Sequence]:
        """A step's sequences, in row order, including those that have ended since."""
        return self._running.sequences_in(record)

    def num_cached_tokens(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence that this rank has cached and may use."""
        return 0 if seq.reads_whole_prompt else self._blocks.num_cached_tokens(seq)

    def flush_prefix_cache(self) -> int:
        """Forget the contents of all blocks; returns how many blocks had one."""
        return self._blocks.flush()

    def open_kv_feed(self) -> KvFeed:
        """Begin to report what the prefix cache holds, over all epochs from now on, until `close_kv_feed`."""
        self._kv_feed = KvFeed(self._cache.block_size * TOKEN_BYTES)
        self._blocks.set_kv_feed(self._kv_feed)
        return self._kv_feed

    def close_kv_feed(self) -> None:
        """Take `open_kv_feed` back."""
        self._kv_feed = None
        self._blocks.set_kv_feed(None)

    def waiting_sequences(self) -> list[Sequence]:
        """Waiting sequences, in the order in which they were added."""
        return list(self._waiting)

    def unfinished(self) -> list[Sequence]:
        """Sequences that have not ended: waiting, running or retiring."""
        held = [*self._running.sequences(), *self._running.retiring()]
        return [*self._waiting, *(seq for seq in held if seq.left_at is None)]

    def check_integrity(self) -> None:
        """Assert that slots, blocks and queues are consistent."""
        assert all(seq.status is SequenceStatus.WAITING for seq in self._waiting), "a waiting sequence's status"
        assert all(not seq.block_table and seq.slot is None for seq in self._waiting), "a waiting sequence holds blocks"
        self._waiting.check_integrity()
        self._preemption.check_integrity()
        self._running.check_integrity()

    def _preempt_for_next(self, now: float) -> None:
        waiting = self._prefill.next_waiting(now) if self._may_admit(now) else None
        if waiting is None:
            return
        seq, num_blocks = waiting
        if self._has_classes:
            self._preemption.preempt_for(seq, num_blocks, now)
        if self._waiting.tenants.are_shared:
            self._preemption.preempt_above_share(seq, num_blocks, now)

    def _plan_decodes(self, now: float) -> Decodes:
        decodes = self._decode.plan(now)
        if self._shares.holdings is not None:
            self._shares.note_growth(decodes.append_slots)
        return decodes

    def _plan_prefill(self, budget: int, may_admit: bool, now: float) -> Prefill:
        if not self._waiting.num_next and not self._running.begun:
            return _NO_PREFILL
        return self._prefill.plan(budget, now, may_admit=may_admit and self._may_admit(now))

    def _may_admit(self, now: float) -> bool:
        # A parked sequence is queued again when its steps return; nothing may overtake it.
        if self._preemption.num_parked:
            return False
        return not self._policy.delay_factor or self._gate_is_open(now)

    def _gate_is_open(self, now: float) -> bool:
        """A delayed prefill lets more prompts share it."""
        if not self.num_running or not self._waiting:
            return True
        waited = now - self._waiting.oldest_arrived_at()
        return waited > self._policy.delay_factor * self._postprocessor.last_prefill_latency

    def _take_waiting(self, now: float) -> list[Sequence]:
        waiting = list(self._waiting)
        for seq in waiting:
            self._waiting.remove(seq, now)
        return waiting
