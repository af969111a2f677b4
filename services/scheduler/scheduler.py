"""Which sequences the next step computes: prefill first, on paged KV blocks, with preemption.

Sans-I/O: no clock but the `now` it is passed. The names and the order of decisions follow ATOM's scheduler and
nano-vLLM's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from services.scheduler.batch import (
    EnteringSequence,
    Outputs,
    OutputsByClient,
    RequestEnd,
    RequestStart,
    ScheduledBatch,
    StepKind,
    StepRecord,
)
from services.scheduler.block_manager import BlockManager
from services.scheduler.sequence import TOKEN_BYTES, Finish, FinishReason, Sequence, SequenceStatus, SequenceType
from services.scheduler.slot_table import IntColumn, SlotTable
from services.scheduler.stops import find_finish, watched_tokens
from shared.errors import NumericError


@dataclass(frozen=True, slots=True)
class SchedulerPolicy:
    """How the scheduler decides; defaults are ATOM's."""

    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    delay_factor: float = 0.0
    max_steps_in_flight: int = 2


@dataclass(slots=True)
class SchedulerCounters:
    """What happened since the process started."""

    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_preemptions: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_finished: int = 0


class Scheduler:
    """The waiting and running sequences of one worker.

    Steps are sent ahead of their predecessors' results: a sequence then has a placeholder for each token that is on
    its way, and the worker feeds each step from the tokens it sampled itself.

    Invariant: a running sequence has a slot and the blocks of all tokens that were computed or are in flight; a
    waiting one has neither, unless a step in flight still names it. `running` keeps the order of entry, which is
    the worker's batch order: what leaves `running` leaves the worker with the next step.
    """

    def __init__(
        self, policy: SchedulerPolicy, blocks: BlockManager, eos_token_ids: frozenset[int], counters: SchedulerCounters
    ) -> None:
        self.blocks = blocks
        self.counters = counters
        self.waiting: deque[Sequence] = deque()
        self._policy = policy
        self._eos_token_ids = eos_token_ids
        self._slots = SlotTable(policy.max_num_seqs, blocks.block_size)
        self._running: IntColumn = np.empty(0, np.int32)
        self._in_flight: deque[StepRecord] = deque()
        self._num_parked = 0
        self._leave_slots: list[int] = []
        self._last_step_id = 0
        self._last_prefill_latency = 0.0

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and may get tokens."""
        return len(self._running)

    @property
    def in_flight(self) -> deque[StepRecord]:
        """Steps that have been sent and have not returned, oldest first."""
        return self._in_flight

    def add(self, seq: Sequence) -> None:
        """Put a new sequence at the end of the waiting queue."""
        self.waiting.append(seq)

    def schedule(self, now: float) -> tuple[int, ScheduledBatch] | None:
        """Plan the next step: a prefill when the gate is open and one fits, else a decode of all that run.

        Returns:
            The step's id and its plan; its record is in flight from then on. None when there is nothing to do, or
            as many steps are in flight as may be.
        """
        if len(self._in_flight) >= self._policy.max_steps_in_flight:
            return None
        batch = self._schedule_prefill(now) or self._schedule_decode()
        if batch is None:
            return None
        self._last_step_id += 1
        self._slots.last_step_id[batch.row_slots] = self._last_step_id
        self._slots.num_in_flight[batch.row_slots] += 1
        self._in_flight.append(StepRecord(self._last_step_id, batch.kind, batch.row_slots, now))
        self._retire_complete(batch.row_slots)
        return self._last_step_id, batch

    def postprocess(self, token_ids: IntColumn, not_finite_rows: IntColumn, now: float) -> dict[int, Outputs]:
        """Take in the tokens of the oldest step in flight, and end what stops with them.

        Args:
            token_ids: One a row of the record, in its order.
            not_finite_rows: Row numbers whose requests fail with NumericError.
            now: The time.

        Returns:
            What each client that is concerned is told.
        """
        record = self._in_flight.popleft()
        self._slots.num_in_flight[record.row_slots] -= 1
        outputs = OutputsByClient()
        is_usable = self._slots.live[record.row_slots]
        for row in np.unique(not_finite_rows[is_usable[not_finite_rows]]):
            is_usable[row] = False
            self._fail_not_finite(self._slots.sequence_at(int(record.row_slots[row])), outputs, now)
        slots, token_ids = record.row_slots[is_usable], token_ids[is_usable]
        first_indexes = self._slots.num_tokens[slots] - self._slots.num_prompt_tokens[slots]
        outputs.add_rows(self._slots.client[slots], self._slots.handle[slots], first_indexes, token_ids)
        self._slots.append(slots, token_ids)
        if record.kind is StepKind.PREFILL:
            self._last_prefill_latency = now - record.sent_at
            self._start(slots, outputs, now)
        self._end_stopped(slots, token_ids, outputs, now)
        self._end_retiring(record)
        return outputs.by_client

    def stop_at(self, seq: Sequence, num_completion_tokens: int, now: float) -> RequestEnd:
        """End a sequence at a stop string that was found in its text; tokens behind it do not count."""
        if seq.slot is not None:
            self._store(seq)
        num_known = seq.num_stored_tokens - seq.num_prompt_tokens
        return self._finish(
            seq, Finish(FinishReason.STOP_STRING), now, num_completion_tokens=min(num_completion_tokens, num_known)
        )

    def abort(self, seq: Sequence, now: float) -> None:
        """Forget a sequence; its blocks are free once its step in flight has returned."""
        if seq.slot is not None:
            self._store(seq)
        self._leave(seq, now, SequenceStatus.EXIT_ENGINE)

    def check_integrity(self) -> None:
        """Assert that slots, blocks and queues agree."""
        retiring = [seq for record in self._in_flight for seq in record.retiring]
        running = [self._slots.sequence_at(int(slot)) for slot in self._running]
        assert all(seq.status is SequenceStatus.RUNNING and not seq.is_retiring for seq in running), "running"
        assert all(seq.is_retiring for seq in retiring), "retiring"
        assert all(seq.status is SequenceStatus.WAITING for seq in self.waiting), "a waiting sequence's status"
        assert all(not seq.block_table and seq.slot is None for seq in self.waiting), "a waiting sequence holds blocks"
        assert self._num_parked == sum(seq.status is SequenceStatus.WAITING for seq in retiring), "parked"
        taken = self._policy.max_num_seqs - self._slots.num_free_slots
        assert taken == len(running) + len(retiring), "slots"
        for seq in [*running, *retiring]:
            assert self._slots.num_blocks[seq.slot] == len(seq.block_table), "the block column"
            num_rows = sum(seq.slot in record.row_slots for record in self._in_flight)
            assert self._slots.num_in_flight[seq.slot] == num_rows, "placeholders"
        self.blocks.check_integrity([*running, *retiring])

    def _schedule_prefill(self, now: float) -> ScheduledBatch | None:
        # A parked sequence goes to the front when its steps return: nobody overtakes it.
        if not self.waiting or self._num_parked or not self._prefill_may_start(now):
            return None
        budget = self._policy.max_num_batched_tokens
        admitted: list[Sequence] = []
        # A slot that a step in flight still names is a place that is taken.
        while self.waiting and len(admitted) < self._slots.num_free_slots:
            seq = self.waiting[0]
            if not self.blocks.try_allocate(seq, budget):
                break
            self.waiting.popleft()
            budget -= seq.num_stored_tokens - seq.num_cached_tokens
            admitted.append(seq)
        if not admitted:
            return None
        return self._prefill_batch(admitted)

    def _prefill_may_start(self, now: float) -> bool:
        """The delay gate: with a factor, a prefill waits a while so that more prompts share it."""
        if not self._policy.delay_factor or not len(self._running):
            return True
        # Preempted sequences go back to the front by arrival, so the first is the oldest.
        waited = now - self.waiting[0].arrive_time
        return waited > self._policy.delay_factor * self._last_prefill_latency

    def _prefill_batch(self, admitted: list[Sequence]) -> ScheduledBatch:
        leave_slots = self._take_leave_slots()
        enters = [self._enter(seq) for seq in admitted]
        row_slots = np.array([entering.slot for entering in enters], np.int32)
        self._running = np.concatenate([self._running, row_slots])
        self.counters.num_prefill_steps += 1
        return ScheduledBatch(StepKind.PREFILL, row_slots, leave_slots, enters)

    def _enter(self, seq: Sequence) -> EnteringSequence:
        slot = self._slots.take(seq, watched_tokens(seq.params, self._eos_token_ids))
        seq.status, seq.type = SequenceStatus.RUNNING, SequenceType.DECODE
        self.counters.num_prefix_queried_tokens += seq.num_stored_tokens
        self.counters.num_prefix_hit_tokens += seq.num_cached_tokens
        self.blocks.publish(seq, seq.num_stored_tokens)
        cached_bytes = seq.num_cached_tokens * TOKEN_BYTES
        return EnteringSequence(
            slot,
            bytes(seq.token_bytes[cached_bytes:]),
            seq.num_cached_tokens,
            seq.num_prompt_tokens,
            list(seq.block_table),
            seq.params,
        )

    def _schedule_decode(self) -> ScheduledBatch | None:
        append_slots, append_block_ids, sitting_out = self._open_blocks()
        rows = self._running
        if sitting_out:
            rows = rows[~np.isin(rows, sitting_out)]
        if not rows.size:
            return None
        for slot in rows[self._slots.has_full_run(rows)]:
            # With this step, all known tokens are computed or on their way to be.
            seq = self._slots.sequence_at(int(slot))
            self._slots.flush(seq)
            self.blocks.publish(seq, seq.num_stored_tokens)
        self.counters.num_decode_steps += 1
        return ScheduledBatch(
            StepKind.DECODE,
            rows,
            self._take_leave_slots(),
            append_slots=append_slots,
            append_block_ids=append_block_ids,
            skips_rows=bool(sitting_out),
        )

    def _open_blocks(self) -> tuple[list[int], list[int], list[int]]:
        """Give each running row the block of the token it computes next; preempt from the end where none is free.

        Returns:
            Parallel lists of the slots that got a block and the blocks, and the slots that sit this step out because
            their block is only coming, when a step returns.
        """
        append_slots: list[int] = []
        append_block_ids: list[int] = []
        sitting_out: list[int] = []
        rows = self._running
        num_computed = self._slots.num_tokens[rows] + self._slots.num_in_flight[rows]
        for slot in rows[num_computed > self._slots.num_blocks[rows] * self.blocks.block_size]:
            seq = self._slots.sequences[slot]
            if seq is None or seq.is_retiring:
                # Preempted for a row before it, like all behind it.
                break
            block = self._block_or_preempt(seq, num_sitting_out=len(sitting_out))
            if block is not None:
                self._slots.num_blocks[slot] += 1
                append_slots.append(int(slot))
                append_block_ids.append(block)
            elif seq.status is SequenceStatus.RUNNING:
                sitting_out.append(int(slot))
        return append_slots, append_block_ids, sitting_out

    def _block_or_preempt(self, seq: Sequence, *, num_sitting_out: int) -> int | None:
        """A block more for `seq`, preempting the last running sequences while none is free or coming.

        Returns:
            None when its block is coming, behind those of `num_sitting_out` others, or `seq` was itself preempted.
        """
        while (block := self.blocks.try_append(seq)) is None:
            if self._num_coming_blocks() > num_sitting_out:
                return None
            last = self._slots.sequence_at(int(self._running[-1]))
            self._preempt(last)
            if last is seq:
                return None
        return block

    def _num_coming_blocks(self) -> int:
        return sum(self.blocks.num_exclusive_blocks(seq) for record in self._in_flight for seq in record.retiring)

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks; it computes its tokens again, as far as they are not cached.

        With a step in flight it is parked: its blocks come, and it goes to the queue, when the last one returns.
        """
        self._store(seq)
        seq.status, seq.type = SequenceStatus.WAITING, SequenceType.PREFILL
        self.counters.num_preemptions += 1
        self._num_parked += 1
        self._drop(seq)
        if not seq.is_retiring:
            self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        self._num_parked -= 1
        self.waiting.appendleft(seq)

    def _retire_complete(self, slots: IntColumn) -> None:
        """Take the rows out that the step just sent brings to their last token: they get no further row."""
        num_tokens = self._slots.num_tokens[slots] + self._slots.num_in_flight[slots]
        for slot in slots[num_tokens >= self._slots.max_num_tokens[slots]]:
            self._drop(self._slots.sequence_at(int(slot)))

    def _start(self, slots: IntColumn, outputs: OutputsByClient, now: float) -> None:
        """Note the first tokens among the rows of a prefill."""
        for slot in slots:
            seq = self._slots.sequence_at(int(slot))
            if seq.first_token_time is None:
                seq.first_token_time = now
                outputs.add_start(seq.client, RequestStart(seq.handle, seq.num_cached_tokens))

    def _end_stopped(self, slots: IntColumn, token_ids: IntColumn, outputs: OutputsByClient, now: float) -> None:
        """End the rows that stop with their newest token."""
        for row in self._slots.find_stops(slots, token_ids):
            seq = self._slots.sequence_at(int(slots[row]))
            self._store(seq)
            finish = find_finish(seq, self._eos_token_ids)
            if finish is not None:
                outputs.add_end(seq.client, self._finish(seq, finish, now))

    def _fail_not_finite(self, seq: Sequence, outputs: OutputsByClient, now: float) -> None:
        self._slots.flush(seq)
        self.blocks.hide_computed(seq)
        self._leave(seq, now, SequenceStatus.EXIT_ENGINE)
        error = NumericError("the model's logits were not finite")
        outputs.add_end(seq.client, RequestEnd(seq.handle, error=error))

    def _finish(
        self, seq: Sequence, finish: Finish, now: float, num_completion_tokens: int | None = None
    ) -> RequestEnd:
        if num_completion_tokens is None:
            num_completion_tokens = seq.num_stored_tokens - seq.num_prompt_tokens
        seq.finish = finish
        self._leave(seq, now, SequenceStatus.FINISHED)
        return RequestEnd(seq.handle, num_completion_tokens, finish)

    def _leave(self, seq: Sequence, now: float, status: SequenceStatus) -> None:
        """End a sequence whose tokens are flushed, wherever it is."""
        is_parked = seq.status is SequenceStatus.WAITING and seq.is_retiring
        seq.status = status
        seq.leave_time = now
        self.counters.num_finished += 1
        if seq.slot is None:
            self.waiting.remove(seq)
            return
        self._slots.live[seq.slot] = False
        if is_parked:
            self._num_parked -= 1
        if not seq.is_retiring:
            self._drop(seq)

    def _drop(self, seq: Sequence) -> None:
        """Take a sequence out of `running`; what it holds comes back now, or when its last step in flight returns."""
        assert seq.slot is not None
        self._running = self._running[self._running != seq.slot]
        self._leave_slots.append(seq.slot)
        if not self._slots.num_in_flight[seq.slot]:
            self._give_back(seq)
            return
        seq.is_retiring = True
        last_step_id = self._slots.last_step_id[seq.slot]
        record = next(record for record in reversed(self._in_flight) if record.step_id == last_step_id)
        record.retiring.append(seq)

    def _end_retiring(self, record: StepRecord) -> None:
        """Take back what the record held; parked sequences go to the front of the queue, several by arrival."""
        parked: list[Sequence] = []
        for seq in record.retiring:
            seq.is_retiring = False
            if seq.status is SequenceStatus.WAITING:
                self._store(seq)
                parked.append(seq)
            self._give_back(seq)
        for seq in sorted(parked, key=lambda seq: seq.arrive_time, reverse=True):
            self._requeue(seq)

    def _give_back(self, seq: Sequence) -> None:
        """Free the blocks and the slot of a sequence that no step in flight names."""
        self.blocks.free(seq)
        self._slots.release(seq)

    def _store(self, seq: Sequence) -> None:
        """Store a running sequence's newest tokens and publish what is computed: all but the newest."""
        self._slots.flush(seq)
        self.blocks.publish(seq, seq.num_stored_tokens - 1)

    def _take_leave_slots(self) -> list[int]:
        leave_slots, self._leave_slots = self._leave_slots, []
        return leave_slots
