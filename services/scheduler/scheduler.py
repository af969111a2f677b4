"""Which sequences the next step computes: prefill first, on paged KV blocks, with preemption.

Sans-I/O: no clock but the `now` it is passed. The names and the order of decisions follow ATOM's scheduler and
nano-vLLM's.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from services.scheduler.batch import (
    AppendedBlocks,
    Outputs,
    OutputsByClient,
    RequestEnd,
    RequestStart,
    ScheduledBatch,
    StepKind,
    StepRecord,
)
from services.scheduler.block_manager import BlockManager
from services.scheduler.policy import SchedulerCounters, SchedulerPolicy
from services.scheduler.prefill import Prefill, PrefillPlanner
from services.scheduler.running_batch import RunningBatch
from services.scheduler.sequence import Finish, FinishReason, Sequence, SequenceStatus, SequenceType
from services.scheduler.slot_table import IntColumn
from services.scheduler.stops import find_finish
from services.scheduler.waiting_queue import WaitingQueue
from shared.errors import NumericError

_NO_SLOTS = np.empty(0, np.int32)


class Scheduler:
    """The waiting and running sequences of one worker.

    Steps are sent ahead of their predecessors' results: a sequence then has a placeholder for each token that is on
    its way, and the worker feeds each step from the tokens it sampled itself.

    Invariant: a running sequence has a slot and the blocks of all tokens that were computed or are in flight, of its
    whole prompt from its first chunk on; a waiting one has neither, unless it is parked: it was preempted, and a
    step in flight still names it.
    """

    def __init__(
        self, policy: SchedulerPolicy, blocks: BlockManager, eos_token_ids: frozenset[int], counters: SchedulerCounters
    ) -> None:
        self.blocks = blocks
        self.counters = counters
        self._policy = policy
        self._eos_token_ids = eos_token_ids
        self._running = RunningBatch(policy.max_num_seqs, blocks)
        self._slots = self._running.slots
        self._prefill = PrefillPlanner(policy, self._running, eos_token_ids, counters)
        self._num_parked = 0
        self._last_prefill_latency = 0.0

    @property
    def waiting(self) -> WaitingQueue:
        """Sequences that wait for their first step, or to be prefilled again, the next one first."""
        return self._prefill.waiting

    @property
    def num_running(self) -> int:
        """Sequences that get rows."""
        return len(self._running.order)

    @property
    def in_flight(self) -> deque[StepRecord]:
        """Steps that have been sent and have not returned, oldest first."""
        return self._running.in_flight

    def add(self, seq: Sequence) -> None:
        """Put a new sequence at the end of the waiting queue."""
        self.waiting.append(seq)

    def schedule(self, now: float) -> tuple[int, ScheduledBatch] | None:
        """Plan the next step: a prefill when the gate is open and one fits, else a decode of all that run.

        With mixed steps, decodes join a prefill, and what they leave of the budget is the prefill's.

        Returns:
            The step's id and its plan; its record is in flight from then on. None when there is nothing to do, or
            as many steps are in flight as may be.
        """
        if len(self.in_flight) >= self._policy.max_steps_in_flight:
            return None
        if self._policy.enable_mixed_steps:
            batch = self._schedule_mixed(now)
        else:
            batch = self._schedule_prefill(now) or self._schedule_decode()
        if batch is None:
            return None
        if batch.kind is StepKind.DECODE:
            self.counters.num_decode_steps += 1
        else:
            self.counters.num_prefill_steps += 1
        return self._running.send(batch, now), batch

    def postprocess(self, token_ids: IntColumn, not_finite_rows: IntColumn, now: float) -> dict[int, Outputs]:
        """Take in the tokens of the oldest step in flight, and end what stops with them.

        Args:
            token_ids: One a row of the record, in its order.
            not_finite_rows: Row numbers whose requests fail with NumericError.
            now: The time.

        Returns:
            What each client that is concerned is told.
        """
        record = self._running.pop_record()
        outputs = OutputsByClient()
        is_usable = self._slots.live[record.row_slots]
        for row in np.unique(not_finite_rows[is_usable[not_finite_rows]]):
            is_usable[row] = False
            self._fail_not_finite(self._slots.sequence_at(int(record.row_slots[row])), outputs, now)
        slots, token_ids = record.row_slots[is_usable], token_ids[is_usable]
        first_indexes = self._slots.num_tokens[slots] - self._slots.num_prompt_tokens[slots]
        outputs.add_rows(self._slots.client[slots], self._slots.handle[slots], first_indexes, token_ids)
        self._slots.append(slots, token_ids)
        if record.is_prefill:
            self._last_prefill_latency = now - record.sent_at
            self._start(slots, outputs, now)
        self._end_stopped(slots, token_ids, outputs, now)
        self._end_retiring(record)
        return outputs.by_client

    def stop_at(self, seq: Sequence, num_completion_tokens: int, now: float) -> RequestEnd:
        """End a sequence at a stop string that was found in its text; tokens behind it do not count."""
        if seq.slot is not None:
            self._running.store(seq)
        num_known = seq.num_stored_tokens - seq.num_prompt_tokens
        return self._finish(
            seq, Finish(FinishReason.STOP_STRING), now, num_completion_tokens=min(num_completion_tokens, num_known)
        )

    def abort(self, seq: Sequence, now: float) -> None:
        """Forget a sequence; its blocks are free once its steps in flight have returned."""
        if seq.slot is not None:
            self._running.store(seq)
        self._leave(seq, now, SequenceStatus.EXIT_ENGINE)

    def check_integrity(self) -> None:
        """Assert that slots, blocks and queues agree."""
        assert all(seq.status is SequenceStatus.WAITING for seq in self.waiting), "a waiting sequence's status"
        assert all(not seq.block_table and seq.slot is None for seq in self.waiting), "a waiting sequence holds blocks"
        self.waiting.check_integrity()
        retiring = [seq for record in self.in_flight for seq in record.retiring]
        assert self._num_parked == sum(seq.status is SequenceStatus.WAITING for seq in retiring), "parked"
        assert self._prefill.begun == [seq for seq in self._running.sequences() if seq.num_unsent_tokens], (
            "begun prompts"
        )
        self._running.check_integrity()

    def _schedule_prefill(self, now: float) -> ScheduledBatch | None:
        prefill = self._plan_prefill(self._policy.max_num_batched_tokens, now)
        return None if prefill.is_empty else _batch(self._running, _NO_SLOTS, prefill)

    def _schedule_decode(self) -> ScheduledBatch | None:
        appended = self._open_blocks()
        rows = self._take_decode_rows(appended.sitting_out)
        if not rows.size:
            return None
        return _batch(self._running, rows, Prefill(0, [], []), appended)

    def _schedule_mixed(self, now: float) -> ScheduledBatch | None:
        appended = self._open_blocks()
        rows = self._take_decode_rows(appended.sitting_out)
        prefill = self._plan_prefill(self._policy.max_num_batched_tokens - len(rows), now)
        if not rows.size and prefill.is_empty:
            return None
        return _batch(self._running, rows, prefill, appended)

    def _plan_prefill(self, budget: int, now: float) -> Prefill:
        # A parked sequence goes to the front when its steps return: nobody overtakes it.
        return self._prefill.plan(budget, now, may_admit=not self._num_parked and self._gate_is_open(now))

    def _gate_is_open(self, now: float) -> bool:
        """The delay gate: with a factor, a prefill waits a while so that more prompts share it."""
        if not self._policy.delay_factor or not self.num_running or not self.waiting:
            return True
        # Preempted sequences go back to the front by arrival, so the first is the oldest.
        waited = now - self.waiting.first.arrive_time
        return waited > self._policy.delay_factor * self._last_prefill_latency

    def _take_decode_rows(self, sitting_out: list[int]) -> IntColumn:
        """The rows that compute their newest token, which is stored where its run is full."""
        rows = self._running.decode_rows
        if sitting_out:
            rows = rows[~np.isin(rows, sitting_out)]
        for slot in rows[self._slots.has_full_run(rows)]:
            # With this step, all known tokens are computed or on their way to be.
            seq = self._slots.sequence_at(int(slot))
            self._slots.flush(seq)
            self.blocks.publish(seq, seq.num_stored_tokens)
        return rows

    def _open_blocks(self) -> AppendedBlocks:
        """Give each decode row the block of the token it computes next; preempt from the end where none is free."""
        appended = AppendedBlocks([], [], [])
        rows = self._running.decode_rows
        num_computed = self._slots.num_tokens[rows] + self._slots.num_in_flight[rows]
        for slot in rows[num_computed > self._slots.num_blocks[rows] * self.blocks.block_size]:
            seq = self._slots.sequences[slot]
            if seq is None or seq.is_retiring:
                # Preempted for a row before it, like all behind it.
                break
            block = self._block_or_preempt(seq, num_sitting_out=len(appended.sitting_out))
            if block is not None:
                self._slots.num_blocks[slot] += 1
                appended.slots.append(int(slot))
                appended.block_ids.append(block)
            elif seq.status is SequenceStatus.RUNNING:
                appended.sitting_out.append(int(slot))
        return appended

    def _block_or_preempt(self, seq: Sequence, *, num_sitting_out: int) -> int | None:
        """A block more for `seq`, preempting the last running sequences while none is free or coming.

        Returns:
            None when its block is coming, behind those of `num_sitting_out` others, or `seq` was itself preempted.
        """
        while (block := self.blocks.try_append(seq)) is None:
            if self._running.num_coming_blocks() > num_sitting_out:
                return None
            last = self._running.last()
            self._preempt(last)
            if last is seq:
                return None
        return block

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks; it computes its tokens again, as far as they are not cached.

        With a step in flight it is parked: its blocks come, and it goes to the queue, when the last one returns.
        """
        self._running.store(seq)
        seq.status, seq.type = SequenceStatus.WAITING, SequenceType.PREFILL
        self.counters.num_preemptions += 1
        self._num_parked += 1
        self._drop(seq)
        if not seq.is_retiring:
            self._requeue(seq)

    def _requeue(self, seq: Sequence) -> None:
        self._num_parked -= 1
        self.waiting.push_front(seq)

    def _start(self, slots: IntColumn, outputs: OutputsByClient, now: float) -> None:
        """Note the first tokens among rows that have got theirs."""
        num_completion_tokens = self._slots.num_tokens[slots] - self._slots.num_prompt_tokens[slots]
        for slot in slots[num_completion_tokens == 1]:
            seq = self._slots.sequence_at(int(slot))
            seq.first_token_time = now
            assert seq.num_first_cached_tokens is not None
            outputs.add_start(seq.client, RequestStart(seq.handle, seq.num_first_cached_tokens))

    def _end_stopped(self, slots: IntColumn, token_ids: IntColumn, outputs: OutputsByClient, now: float) -> None:
        """End the rows that stop with their newest token."""
        for row in self._slots.find_stops(slots, token_ids):
            seq = self._slots.sequence_at(int(slots[row]))
            self._running.store(seq)
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
        """End a sequence whose tokens are stored, wherever it is."""
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
        if seq.num_unsent_tokens:
            self._prefill.begun.remove(seq)
        self._running.drop(seq)

    def _end_retiring(self, record: StepRecord) -> None:
        """Take back what the record held; parked sequences go to the front of the queue, several by arrival."""
        parked: list[Sequence] = []
        for seq in record.retiring:
            if seq.status is SequenceStatus.WAITING:
                self._running.store(seq)
                parked.append(seq)
            self._running.give_back(seq)
        for seq in sorted(parked, key=lambda seq: seq.arrive_time, reverse=True):
            self._requeue(seq)


def _batch(
    running: RunningBatch, decode_slots: IntColumn, prefill: Prefill, appended: AppendedBlocks | None = None
) -> ScheduledBatch:
    """Put a step together. Its rows are the decodes, then the prompts that are complete with it."""
    sent = [*prefill.chunks, *(entering.chunk for entering in prefill.enters)]
    complete = np.array([chunk.slot for chunk in sent if not chunk.num_later_tokens], np.int32)
    kind = StepKind.DECODE if not sent else StepKind.MIXED if decode_slots.size else StepKind.PREFILL
    return ScheduledBatch(
        kind,
        row_slots=np.concatenate([decode_slots, complete]) if sent else decode_slots,
        decode_slots=decode_slots,
        partial_slots=[chunk.slot for chunk in sent if chunk.num_later_tokens],
        leave_slots=running.take_leave_slots(),
        chunks=prefill.chunks,
        enters=prefill.enters,
        append_slots=appended.slots if appended else [],
        append_block_ids=appended.block_ids if appended else [],
        skips_rows=bool(appended and appended.sitting_out),
    )
