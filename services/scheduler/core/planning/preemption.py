"""What happens when blocks or slots run out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from services.scheduler.core.admission import NewTokenRatio
from services.scheduler.core.batch.sequence import Priority, Sequence, SequenceStatus, SequenceType
from services.scheduler.core.batch.slot_table import Slots
from services.scheduler.core.batch.step import StepRecord
from services.scheduler.core.planning.shares import Shares
from services.scheduler.core.policy import RetractionPolicy, SchedulerCounters, SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy, WaitingQueue
from services.scheduler.core.running_batch import RunningBatch
from shared.ids import Slot
from shared.step.columns import Int32Column


class Preemption:
    """Takes the blocks of running sequences and queues the sequences again.

    Invariant: `num_parked` counts the sequences that were preempted while a step in flight still names them. They are
    WAITING but in no queue until their last step has returned; its tokens still count.
    """

    def __init__(
        self,
        policy: SchedulerPolicy,
        waiting: WaitingQueue,
        running: RunningBatch,
        shares: Shares,
        new_token_ratio: NewTokenRatio,
        counters: SchedulerCounters,
    ) -> None:
        self.num_parked = 0
        self._shares = shares
        self._new_token_ratio = new_token_ratio
        self._policy = policy
        self._waiting = waiting
        self._running = running
        self._slots = running.slots
        self._blocks = running.blocks
        self._counters = counters

    def retract(self, grower: Sequence, now: float) -> Sequence:
        """Preempt the running sequence that the retraction policy chooses, for one that grows; returns it.

        Under the priority policy it is one of the lowest class: a sequence that made way for a more urgent one must not
        take its blocks back by growing. With several tenants it is one of the tenant furthest above its share.
        """
        order = self._least_urgent(now)
        if self._waiting.tenants.are_shared:
            order = self._shares.of_furthest_above(order)
        num_completion_tokens = self._slots.num_tokens - self._slots.num_prompt_tokens
        victim = pick_victim(self._policy.retraction_policy, order, num_completion_tokens)
        seq = self._slots.sequence_at(Slot(int(order[victim])))
        seq.pays_again = seq.tenant_number == grower.tenant_number
        self.preempt(seq, now)
        self._new_token_ratio.on_retraction(*self._running.progress(), len(self._running.order))
        return seq

    def preempt_for(self, urgent: Sequence, num_blocks: int, now: float) -> None:
        """Preempt running sequences of lower classes, the lowest and latest first, until `urgent` may enter.

        Preempts as few as needed, and none if all of them would not suffice. An aged sequence counts as most urgent.

        Args:
            urgent: The next waiting sequence, which lacks a slot or blocks.
            num_blocks: How many of the free blocks it needs.
        """
        self._make_room(self._lower_classes(urgent.priority, now), *self._missing(num_blocks), now)

    def preempt_above_share(self, seq: Sequence, num_blocks: int, now: float) -> None:
        """Preempt sequences of tenants above their shares until `seq` may enter and keeps its tenant within its own.

        As `preempt_for`, with the victims of `Shares.victims_for`. What they free is kept for `seq` until it enters.
        """
        num_missing_blocks, num_missing_slots = self._missing(num_blocks)
        if num_missing_blocks <= 0 and num_missing_slots <= 0:
            return
        victims = self._shares.victims_for(seq, lacks_slot=num_missing_slots > 0, lacks_blocks=num_missing_blocks > 0)
        made_way = self._make_room(victims, num_missing_blocks, num_missing_slots, now)
        for victim in made_way:
            victim.num_tokens_when_made_way = victim.num_stored_tokens
        if made_way:
            self._waiting.hold(seq)

    def preempt(self, seq: Sequence, now: float) -> None:
        """Take a sequence's blocks; it later recomputes what is no longer cached.

        While a step in flight names it, it is parked.
        """
        self._running.store(seq)
        seq.status, seq.type = SequenceStatus.WAITING, SequenceType.PREFILL
        self._counters.num_preemptions += 1
        self._running.drop(seq)
        self._shares.note_preemption()
        if seq.is_retiring:
            self.num_parked += 1
        else:
            self._waiting.add(seq, now)

    def take_back(self, record: StepRecord, now: float) -> None:
        """Free what a returned step was the last to use, and queue parked sequences."""
        if not record.retiring:
            return
        parked = [seq for seq in record.retiring if seq.status is SequenceStatus.WAITING]
        for seq in parked:
            self._running.store(seq)
        self._running.release(record.retiring)
        self.num_parked -= len(parked)
        for seq in parked:
            self._waiting.add(seq, now)

    def drop_parked(self, seq: Sequence) -> None:
        """Note that a parked sequence has ended."""
        assert seq.is_retiring
        self.num_parked -= 1

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        parked = [seq for seq in self._running.retiring() if seq.status is SequenceStatus.WAITING]
        assert self.num_parked == len(parked), "parked"

    def _missing(self, num_blocks: int) -> tuple[int, int]:
        """Blocks and slots that are neither free nor about to be, for a sequence that needs `num_blocks`."""
        num_missing_blocks = num_blocks - self._blocks.num_free_blocks - self._running.num_coming_blocks()
        return num_missing_blocks, 1 - self._slots.num_free_slots - len(self._running.retiring())

    def _make_room(
        self, candidates: Iterable[Sequence], num_missing_blocks: int, num_missing_slots: int, now: float
    ) -> list[Sequence]:
        """Preempt as few of the candidates as are needed, in their order; none if all of them would not suffice."""
        victims: list[Sequence] = []
        for seq in candidates:
            if num_missing_blocks <= 0 and num_missing_slots <= 0:
                break
            victims.append(seq)
            num_missing_blocks -= self._blocks.num_exclusive_blocks(seq)
            num_missing_slots -= 1
        if num_missing_blocks > 0 or num_missing_slots > 0:
            return []
        for seq in victims:
            self.preempt(seq, now)
        return victims

    def _least_urgent(self, now: float) -> Slots:
        """What the retraction policy chooses from, in order of entry; never empty."""
        order = self._running.order
        if self._policy.queue_policy is not QueuePolicy.PRIORITY:
            return order
        lower = self._lower_classes(Priority.HIGH, now)
        if not lower:
            return order
        slots = [seq.slot for seq in reversed(lower) if seq.priority == lower[0].priority]
        return np.array(slots, order.dtype)

    def _lower_classes(self, priority: Priority, now: float) -> list[Sequence]:
        """The first to be preempted comes first."""
        order = self._running.order[::-1]
        order = order[self._slots.priority[order] > priority]
        ranked = order[np.argsort(-self._slots.priority[order], kind="stable")]
        sequences = [self._slots.sequence_at(Slot(int(slot))) for slot in ranked]
        return [seq for seq in sequences if not self._waiting.is_aged(seq, now)]


def pick_victim(policy: RetractionPolicy, order: Slots, num_completion_tokens: Int32Column) -> int:
    """Choose the running sequence to preempt next; returns its index in `order`.

    Args:
        order: [num_running], slots in order of entry; at least one.
        num_completion_tokens: [num_slots], by slot.
    """
    last = len(order) - 1
    if policy is RetractionPolicy.LAST_IN:
        return last
    return last - int(np.argmin(num_completion_tokens[order][::-1]))
