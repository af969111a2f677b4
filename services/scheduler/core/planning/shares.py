"""What each tenant holds of a rank, and what is its share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.batch.slot_table import Slots
from services.scheduler.core.queue.waiting_queue import WaitingQueue
from services.scheduler.core.running_batch import RunningBatch
from shared.ids import Slot

_Amounts = npt.NDArray[np.float64]


@dataclass(slots=True)
class Holdings:
    """Slots and blocks of a rank: [num_tenants] each, by the tenant's number. A shared block counts for each holder."""

    slots: _Amounts
    blocks: _Amounts
    slot_shares: _Amounts
    block_shares: _Amounts


class Shares:
    """A rank's slots and blocks, divided among its tenants.

    A tenant's share is its weight over that of all tenants with sequences on the rank, waiting or running; at least one
    slot. Nothing is asked, so nothing is counted, while one tenant is alone in the cell.

    Invariant: until the plan is committed in the course of which they were counted, `holdings` are what the tenants
    hold; None until somebody asks. The next plan must begin with None.
    """

    def __init__(self, max_num_seqs: int, waiting: WaitingQueue, running: RunningBatch) -> None:
        self._max_num_seqs = max_num_seqs
        self.waiting = waiting
        self._tenants = waiting.tenants
        self._running = running
        self._slots = running.slots
        self._blocks = running.blocks
        self.holdings: Holdings | None = None
        """Counted in O(running sequences + tenants), once somebody asks."""

    def note_admission(self, seq: Sequence) -> None:
        """A waiting sequence has got its slot and blocks; O(1)."""
        if self.holdings is not None:
            self.holdings.slots[seq.tenant_number] += 1
            self.holdings.blocks[seq.tenant_number] += len(seq.block_table)

    def note_growth(self, slots: Slots) -> None:
        """Sequences have got a block each time that they are in `slots`."""
        if self.holdings is not None:
            np.add.at(self.holdings.blocks, self._slots.tenant[slots], 1)

    def note_preemption(self) -> None:
        """A running sequence has left, and perhaps its tenant with it."""
        self.holdings = None

    def keeps_share(self, seq: Sequence) -> bool:
        """Whether a waiting sequence, once admitted, leaves its tenant within its share."""
        return self._fits(seq, self._holdings())

    def is_due(self, seq: Sequence) -> bool:
        """Whether a waiting sequence keeps its tenant within its share, and another is above its share of blocks."""
        held = self._holdings()
        return self._fits(seq, held) and bool(np.any(held.blocks > held.block_shares))

    def victims_for(self, seq: Sequence, *, lacks_slot: bool, lacks_blocks: bool) -> Iterator[Sequence]:
        """Running sequences that may make way for a waiting one, the last to enter first.

        Their tenants are above their shares, have no lower counters, and stay at or above their shares without what was
        yielded. A sequence that made way before has got a token since. Nothing is yielded unless `seq` keeps its tenant
        within its share.

        Args:
            lacks_slot: Whether there is no slot for it.
            lacks_blocks: Whether there are too few blocks for it.
        """
        held = self._holdings()
        if not self._fits(seq, held):
            return
        is_above = np.zeros(len(held.slots), bool)
        if lacks_slot:
            is_above |= held.slots - 1 >= held.slot_shares
        if lacks_blocks:
            is_above |= held.blocks - 1 >= held.block_shares
        order = self._running.order[::-1]
        order = order[is_above[self._slots.tenant[order]]]
        if not order.size:
            return
        held = replace(held, slots=held.slots.copy(), blocks=held.blocks.copy())
        counter = self._tenants[seq.tenant_number].counter
        for slot in order.tolist():
            victim, number = self._slots.sequence_at(Slot(slot)), int(self._slots.tenant[slot])
            if victim.priority < seq.priority or self._tenants[number].counter < counter:
                continue
            if self._slots.num_tokens[slot] <= victim.num_tokens_when_made_way:
                continue
            has_slots = held.slots[number] - 1 >= held.slot_shares[number]
            has_blocks = held.blocks[number] - self._slots.num_blocks[slot] >= held.block_shares[number]
            if (lacks_slot and has_slots) or (lacks_blocks and has_blocks):
                held.slots[number] -= 1
                held.blocks[number] -= self._slots.num_blocks[slot]
                yield victim

    def of_furthest_above(self, order: Slots) -> Slots:
        """The slots of `order`, which has at least one, whose tenant's blocks are furthest above its share."""
        # Blocks of the step that is being planned are not noted yet.
        held = self._count()
        numbers = self._slots.tenant[order]
        excess = held.blocks[numbers] / np.maximum(held.block_shares[numbers], 1e-9)
        furthest: Slots = order[numbers == numbers[int(np.argmax(excess))]]
        return furthest

    def check_integrity(self) -> None:
        """Assert the class's invariant, between plan and commit."""
        if self.holdings is not None:
            counted = self._count()
            for field in fields(Holdings):
                assert np.array_equal(getattr(self.holdings, field.name), getattr(counted, field.name)), field.name

    def _holdings(self) -> Holdings:
        if self.holdings is None:
            self.holdings = self._count()
        return self.holdings

    def _count(self) -> Holdings:
        order = self._running.order
        numbers, num_tenants = self._slots.tenant[order], len(self._tenants)
        slots: _Amounts = np.bincount(numbers, minlength=num_tenants).astype(np.float64)
        num_blocks = self._slots.num_blocks[order]
        blocks: _Amounts = np.bincount(numbers, weights=num_blocks, minlength=num_tenants).astype(np.float64)
        is_here = slots > 0
        is_here[[queue.account.number for queue in self.waiting.queues]] = True
        weights = self._tenants.weights * is_here
        fractions = weights / max(weights.sum(), 1e-9)
        return Holdings(
            slots,
            blocks,
            slot_shares=np.maximum(fractions * self._max_num_seqs, 1.0),
            block_shares=fractions * self._blocks.num_blocks,
        )

    def _fits(self, seq: Sequence, held: Holdings) -> bool:
        number, num_blocks = seq.tenant_number, self._blocks.num_blocks_for(seq.num_stored_tokens)
        return bool(
            held.slots[number] + 1 <= held.slot_shares[number]
            and held.blocks[number] + num_blocks <= held.block_shares[number]
        )
