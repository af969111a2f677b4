"""Which sequences hold slots and KV blocks."""

from __future__ import annotations

from collections import deque

import numpy as np

from services.scheduler.core.batch.sequence import RequestKey, Sequence, SequenceStatus
from services.scheduler.core.batch.slot_table import Slots, SlotTable
from services.scheduler.core.batch.step import ScheduledBatch, StepPace, StepRecord
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.state_saves import StateSaves
from shared.ids import Slot
from shared.step.columns import Int32Column
from shared.step.step import StepResult


class RunningBatch:
    """The running sequences, and the retiring ones, which only wait for their last step in flight.

    Invariant: `order` lists the running sequences in order of entry, which is the worker's batch order; one that leaves
    it leaves the worker with the next step. `begun` are those whose prompt is only partly sent. A retiring sequence has
    left `order`, and keeps its slot and blocks until no step in flight names it.
    """

    def __init__(
        self, num_slots: int, blocks: BlockManager, num_draft_tokens: int = 0, states: StateSaves | None = None
    ) -> None:
        """Make an empty batch; `states` decides where recurrent states are saved, None where there are none."""
        self.blocks = blocks
        self.states = states
        self.slots = SlotTable(num_slots, num_draft_tokens)
        self._order: Slots = np.empty(0, np.intp)
        self._has_gaps = False
        self._entered: list[int] = []
        self.begun: list[Sequence] = []
        self.in_flight: deque[StepRecord] = deque()
        self._num_slots = num_slots
        self._leave_slots: list[Slot] = []
        self.last_sent_step_id = 0
        self.last_returned_step_id = 0

    @property
    def order(self) -> Slots:
        """Running slots, in batch order: [num_running]."""
        if self._entered or self._has_gaps:
            self._settle_order()
        return self._order

    @property
    def decode_rows(self) -> Slots:
        """Running slots whose known tokens are all computed or in flight."""
        return self.order[~self.slots.is_prefilling[self.order]] if self.begun else self.order

    def sequences(self) -> list[Sequence]:
        """Running sequences, in batch order."""
        return [self.slots.sequence_at(Slot(int(slot))) for slot in self.order]

    def progress(self) -> tuple[int, int]:
        """Completion tokens of the running sequences, and the most they may have."""
        num_prompt_tokens = self.slots.num_prompt_tokens[self.order]
        num_tokens = self.slots.num_tokens[self.order] - num_prompt_tokens
        max_num_tokens = self.slots.max_num_tokens[self.order] - num_prompt_tokens
        return int(num_tokens.sum()), int(max_num_tokens.sum())

    def enter(self, seq: Sequence, watched_tokens: list[int]) -> int:
        """Give an admitted sequence a slot, last in order."""
        if self._has_gaps:
            # The slot taken may be one that was just left, which must be out of the order first.
            self._settle_order()
        slot = self.slots.take(seq, watched_tokens)
        self._entered.append(slot)
        if seq.num_unsent_tokens:
            self.begun.append(seq)
        seq.status = SequenceStatus.RUNNING
        return slot

    def drop(self, seq: Sequence) -> None:
        """Take out a running sequence; what it holds is freed once no step in flight names it."""
        assert seq.slot is not None
        self.slots.runs[seq.slot] = False
        self._has_gaps = True
        self._leave_slots.append(seq.slot)
        if seq.num_unsent_tokens:
            self.begun.remove(seq)
        record = self._last_record_of(seq)
        if record is None:
            self.release([seq])
        else:
            seq.is_retiring = True
            record.retiring.append(seq)

    def release(self, sequences: list[Sequence]) -> None:
        """Free what sequences hold; no step in flight may name them."""
        self.blocks.free(sequences)
        for seq in sequences:
            seq.is_retiring = False
            self.slots.release(seq)

    def store(self, seq: Sequence) -> None:
        """Store a sequence's newest tokens, and publish its blocks that are computed or in flight."""
        self.slots.flush(seq)
        # The newest token of a generating sequence is computed by its next step. Nothing before it is written
        # again: rejected drafts, and rows that turn out to be wasted, write from there on.
        num_not_sent = seq.num_unsent_tokens or 1
        self.blocks.publish(seq, seq.num_stored_tokens - num_not_sent)

    def commit(self, batch: ScheduledBatch, now: float, pace: StepPace | None = None) -> int:
        """Record a step in flight; returns its id. `pace` defaults to that of the batch."""
        self.last_sent_step_id += 1
        kind, num_tokens = (batch.kind, batch.num_tokens) if pace is None else pace
        num_planned = self.slots.num_planned[batch.row_slots] + 1
        self.slots.num_planned[batch.row_slots] = num_planned
        self.in_flight.append(
            StepRecord(
                self.last_sent_step_id,
                kind,
                num_tokens,
                batch.row_slots,
                batch.partial_slots,
                batch.state_saves,
                batch.state_restores,
                now,
            )
        )
        self.retire_complete(batch.row_slots, num_planned)
        return self.last_sent_step_id

    def retire_complete(self, slots: Slots, num_planned: Int32Column) -> None:
        """Take out the sequences that the steps in flight are certain to complete.

        Args:
            slots: [num_rows], of sequences that are or were running.
            num_planned: [num_rows], the least number of tokens they will have.
        """
        for slot in slots[num_planned >= self.slots.constants(slots).max_num_tokens].tolist():
            if self.slots.runs[slot]:
                self.drop(self.slots.sequence_at(slot))

    def pop_record(self) -> StepRecord:
        """Remove and return the oldest step in flight."""
        record = self.in_flight.popleft()
        self.last_returned_step_id = record.step_id
        return record

    def end_states(self, record: StepRecord, result: StepResult) -> None:
        """Take in which states a step saved and restored, before its tokens."""
        if self.states is not None:
            self.states.end_records(record, result.counts, self.slots)
        self.blocks.end_step(record.state_saves, record.state_restores, result.not_finite_saves)

    def take_leave_slots(self) -> list[Slot]:
        """Take the slots that leave the worker's batch with the next step."""
        leave_slots, self._leave_slots = self._leave_slots, []
        return leave_slots

    def sequences_in(self, record: StepRecord) -> list[Sequence]:
        """A step's sequences, in row order, including those that have ended since."""
        return [self.slots.sequence_at(slot) for slot in (*record.row_slots.tolist(), *record.partial_slots)]

    def in_flight_keys(self) -> list[RequestKey]:
        """The unfinished requests in flight, each once, in row order."""
        sequences = [seq for record in self.in_flight for seq in self.sequences_in(record)]
        return list(dict.fromkeys(seq.key for seq in sequences if seq.left_at is None))

    def void(self) -> list[Sequence]:
        """Take back the unfinished sequences with their tokens; the steps in flight are lost.

        The batch and its blocks must not be used afterwards.
        """
        unfinished = [
            seq
            for seq in [*self.sequences(), *self.retiring()]
            if seq.status in (SequenceStatus.WAITING, SequenceStatus.RUNNING)
        ]
        for seq in unfinished:
            self.slots.flush(seq)
            seq.leave_worker()
        return unfinished

    def retiring(self) -> list[Sequence]:
        """The retiring sequences."""
        return [seq for record in self.in_flight for seq in record.retiring]

    def num_coming_blocks(self) -> int:
        """Blocks that the steps in flight will free."""
        return sum(self.blocks.num_exclusive_blocks(seq) for seq in self.retiring())

    def check_integrity(self) -> None:
        """Assert that slots, records and blocks are consistent."""
        running = self.sequences()
        retiring = self.retiring()
        assert self.begun == [seq for seq in running if seq.num_unsent_tokens], "begun prompts"
        assert all(seq.status is SequenceStatus.RUNNING and not seq.is_retiring for seq in running), "running"
        assert all(seq.is_retiring for seq in retiring), "retiring"
        num_ended = sum(seq.status in (SequenceStatus.FINISHED, SequenceStatus.EXIT_ENGINE) for seq in retiring)
        assert self.slots.num_ended == num_ended, "ended"
        assert self._num_slots - self.slots.num_free_slots == len(running) + len(retiring), "slots"
        for seq in [*running, *retiring]:
            assert self.slots.num_blocks[seq.slot] == len(seq.block_table), "the block column"
            assert self.slots.is_prefilling[seq.slot] == bool(seq.num_unsent_tokens), "the prefilling column"
            num_rows = sum(seq.slot in record.row_slots for record in self.in_flight)
            num_placeholders = self.slots.num_planned[seq.slot] - self.slots.num_tokens[seq.slot]
            assert num_placeholders == num_rows or not self.slots.live[seq.slot], "placeholders"
        self.blocks.check_integrity([*running, *retiring])

    def _settle_order(self) -> None:
        """Apply all entries and departures at once."""
        order = np.concatenate([self._order, np.array(self._entered, np.intp)])
        self._order = order[self.slots.runs[order]]
        self._entered = []
        self._has_gaps = False

    def _last_record_of(self, seq: Sequence) -> StepRecord | None:
        for record in reversed(self.in_flight):
            if seq.slot in record.partial_slots or np.count_nonzero(record.row_slots == seq.slot):
                return record
        return None
