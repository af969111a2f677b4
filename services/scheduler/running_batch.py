"""Who holds slots and KV blocks, in the worker's batch order, and which steps in flight still name them."""

from __future__ import annotations

from collections import deque

import numpy as np

from services.scheduler.batch import ScheduledBatch, StepKind, StepRecord
from services.scheduler.block_manager import BlockManager
from services.scheduler.sequence import Sequence, SequenceStatus
from services.scheduler.slot_table import IntColumn, SlotTable


class RunningBatch:
    """The sequences that run, and those that only wait for their last step in flight to return.

    Invariant: `order` names the sequences that run, in the order of their entry, which is the worker's batch order:
    what leaves it leaves the worker with the next step. A sequence that left it gives its slot and its blocks back
    when no step in flight names it any more; until then it is retiring.
    """

    def __init__(self, num_slots: int, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.slots = SlotTable(num_slots, blocks.block_size)
        self.order: IntColumn = np.empty(0, np.int32)
        self.in_flight: deque[StepRecord] = deque()
        self._num_slots = num_slots
        self._leave_slots: list[int] = []
        self._last_step_id = 0

    @property
    def decode_rows(self) -> IntColumn:
        """The running sequences whose tokens are all computed or on their way to be, in batch order."""
        return self.order[~self.slots.is_prefilling[self.order]]

    def sequences(self) -> list[Sequence]:
        """The running sequences, in batch order."""
        return [self.slots.sequence_at(int(slot)) for slot in self.order]

    def last(self) -> Sequence:
        """The running sequence that entered last; there is one."""
        return self.slots.sequence_at(int(self.order[-1]))

    def enter(self, seq: Sequence, watched_tokens: list[int]) -> int:
        """Give an admitted sequence a slot, behind all others; returns the slot."""
        slot = self.slots.take(seq, watched_tokens)
        self.order = np.append(self.order, np.int32(slot))
        seq.status = SequenceStatus.RUNNING
        return slot

    def drop(self, seq: Sequence) -> None:
        """Take a sequence out; what it holds comes back now, or when its last step in flight returns."""
        assert seq.slot is not None
        self.order = self.order[self.order != seq.slot]
        self._leave_slots.append(seq.slot)
        record = self._last_record_of(seq)
        if record is None:
            self.give_back(seq)
        else:
            seq.is_retiring = True
            record.retiring.append(seq)

    def give_back(self, seq: Sequence) -> None:
        """Free the blocks and the slot of a sequence that no step in flight names."""
        seq.is_retiring = False
        self.blocks.free(seq)
        self.slots.release(seq)

    def store(self, seq: Sequence) -> None:
        """Store a sequence's newest tokens, and publish the blocks of those that are computed or on their way to be."""
        self.slots.flush(seq)
        # The newest token of a sequence that generates is computed by its next step.
        num_not_sent = seq.num_unsent_tokens or 1
        self.blocks.publish(seq, seq.num_stored_tokens - num_not_sent)

    def send(self, batch: ScheduledBatch, now: float) -> int:
        """Note that a step is in flight; returns its id."""
        self._last_step_id += 1
        computed_slots = np.array([*batch.row_slots, *batch.partial_slots], np.int32)
        self.slots.last_step_id[computed_slots] = self._last_step_id
        self.slots.num_in_flight[batch.row_slots] += 1
        is_prefill = batch.kind is not StepKind.DECODE
        self.in_flight.append(StepRecord(self._last_step_id, is_prefill, batch.row_slots, now))
        self._drop_complete(batch.row_slots)
        return self._last_step_id

    def pop_record(self) -> StepRecord:
        """The oldest step in flight, which has returned."""
        record = self.in_flight.popleft()
        self.slots.num_in_flight[record.row_slots] -= 1
        return record

    def take_leave_slots(self) -> list[int]:
        """The slots that leave the worker's batch with the next step."""
        leave_slots, self._leave_slots = self._leave_slots, []
        return leave_slots

    def num_coming_blocks(self) -> int:
        """Blocks that become free when the steps in flight return."""
        return sum(self.blocks.num_exclusive_blocks(seq) for record in self.in_flight for seq in record.retiring)

    def check_integrity(self) -> None:
        """Assert that slots, records and blocks agree."""
        running = self.sequences()
        retiring = [seq for record in self.in_flight for seq in record.retiring]
        assert all(seq.status is SequenceStatus.RUNNING and not seq.is_retiring for seq in running), "running"
        assert all(seq.is_retiring for seq in retiring), "retiring"
        assert self._num_slots - self.slots.num_free_slots == len(running) + len(retiring), "slots"
        for seq in [*running, *retiring]:
            assert self.slots.num_blocks[seq.slot] == len(seq.block_table), "the block column"
            assert self.slots.is_prefilling[seq.slot] == bool(seq.num_unsent_tokens), "the prefilling column"
            num_rows = sum(seq.slot in record.row_slots for record in self.in_flight)
            assert self.slots.num_in_flight[seq.slot] == num_rows, "placeholders"
        self.blocks.check_integrity([*running, *retiring])

    def _last_record_of(self, seq: Sequence) -> StepRecord | None:
        """The newest step in flight that names the sequence."""
        last_step_id = self.slots.last_step_id[seq.slot]
        return next((record for record in reversed(self.in_flight) if record.step_id == last_step_id), None)

    def _drop_complete(self, slots: IntColumn) -> None:
        """Take the rows out that the step just sent brings to their last token: they get no further row."""
        num_tokens = self.slots.num_tokens[slots] + self.slots.num_in_flight[slots]
        for slot in slots[num_tokens >= self.slots.max_num_tokens[slots]]:
            self.drop(self.slots.sequence_at(int(slot)))
