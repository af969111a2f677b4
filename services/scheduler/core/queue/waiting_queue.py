"""The waiting queue of a rank."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterator
from functools import partial

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.queue.drain_rate import MAX_DELAY_S, DrainRate
from services.scheduler.core.queue.queue_order import (
    ArrivalOrder,
    NumCachedTokens,
    PrefixOrder,
    PriorityOrder,
    QueueOrder,
)
from services.scheduler.core.queue.tenant_counters import TenantAccount, TenantCounters
from services.scheduler.core.queue.tenant_queue import TenantQueue
from services.scheduler.core.queue.tenant_turns import KeepsShare, Look, TenantTurns
from shared.tenants.tenant import Tenant


class QueuePolicy(enum.Enum):
    """Which waiting sequence is next, while none has aged."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    LONGEST_PREFIX = "longest_prefix"


_ORDERS: dict[QueuePolicy, Callable[[], QueueOrder]] = {
    QueuePolicy.FCFS: ArrivalOrder,
    QueuePolicy.PRIORITY: PriorityOrder,
    QueuePolicy.LONGEST_PREFIX: PrefixOrder,
}


# Each one that is set aside is looked up when it is, and again after the step that it waits for.
MAX_ASIDE = 128


def _keeps_any_share(_: Sequence) -> bool:
    return True


class WaitingQueue:
    """The waiting sequences of a rank, and which of them is next.

    While one tenant waits, the order is that of `TenantQueue`: aged sequences first, by arrival, under any policy, so
    none starves; then the policy's. While several do, each has such a queue, and `TenantTurns` says which one is next.

    Arrival is by `arrived_at`, so a preempted or resubmitted sequence keeps its place; ties go to those admitted
    before, then to the first added.

    A newcomer that waits for a step in flight is set aside until that step has returned or it turns aged. It keeps its
    place and counts as waiting, but others may pass it.

    The clock never goes back. While a sequence waits, its priority and its times do not change.

    Invariant: `_sequences` are those that wait, in the order in which they were added. They are in `_queue` if `_turns`
    is None, else in the queues there. `num_next` counts those that are not set aside, and `num_new_tokens` are the
    prompt tokens of the leaders among those that were never admitted. `held` waits here, and is not set aside.
    """

    def __init__(
        self,
        policy: QueuePolicy,
        max_age_s: float,
        tenants: TenantCounters | None = None,
    ) -> None:
        """Make an empty queue; `tenants` are those of the cell."""
        self.num_next = 0
        self.num_new_tokens = 0
        self.held: Sequence | None = None
        """The next one, whatever comes, because others made way for it; see `hold`."""
        self.tenants = TenantCounters() if tenants is None else tenants
        self._has_classes = policy is QueuePolicy.PRIORITY
        self._max_age_s = max_age_s
        self._make_queue = partial(_make_queue, policy, max_age_s)
        self._sequences: dict[Sequence, None] = {}
        # The queue is no tenant's yet.
        self._queue = self._make_queue(TenantAccount(0, 1.0))
        self._turns: TenantTurns | None = None
        self._num_added = 0
        # When the first of those that are set aside turns aged, or earlier.
        self._aside_ages_at = math.inf
        self._drain_rate = DrainRate()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they were added."""
        return iter(self._sequences)

    @property
    def queues(self) -> Collection[TenantQueue]:
        """The queues of the tenants that wait here."""
        if self._turns is not None:
            return self._turns.by_tenant.values()
        return (self._queue,) if self._sequences else ()

    def oldest_arrived_at(self) -> float:
        """The earliest arrive time; the queue must not be empty."""
        return min(queue.oldest_arrived_at() for queue in self.queues)

    def retry_delay_s(self, num_places: int, now: float, others: Collection[WaitingQueue] = ()) -> float:
        """Seconds until `num_places` newcomers will have left the queues, which drain in parallel."""
        delays_s = [queue._drain_rate.delay_s(num_places, now) for queue in (self, *others)]
        rate = sum(1.0 / delay_s for delay_s in delays_s if delay_s < MAX_DELAY_S)
        return 1.0 / rate if rate else MAX_DELAY_S

    def load_beside(self, tenant: Tenant, num_tokens: int, tokens_per_seq: int) -> float:
        """What goes before `num_tokens` more tokens of a tenant, or with them: prompt tokens and sequences that wait.

        All that the tenant has waiting counts, and of the others no more than their share meanwhile: what they get by
        their weights until the tenant has got its tokens. O(1).

        Args:
            tokens_per_seq: What a sequence counts in addition to its newcomer's prompt.
        """
        load = self.num_new_tokens + tokens_per_seq * len(self)
        account, turns = self.tenants.account_of(tenant), self._turns
        if turns is None and (not load or self._queue.account is account):
            return load
        own, other_weight = None, self._queue.weight
        if turns is not None:
            own = turns.by_tenant.get(account.number)
            other_weight = turns.weight - (0.0 if own is None else own.weight)
        own_load = 0 if own is None else own.num_new_tokens + tokens_per_seq * len(own.arrivals)
        share = (own_load + num_tokens) * other_weight / account.weight
        return own_load + min(load - own_load, share)

    def add(self, seq: Sequence, now: float) -> None:
        """Add a sequence at its place."""
        seq.queued_at = now
        self._num_added += 1
        account = self.tenants.add_waiting(seq)
        is_new = not seq.was_admitted
        arrival = (seq.arrived_at, is_new, self._num_added)
        if self._turns is None and account is not self._queue.account:
            if self._sequences:
                self._turns = TenantTurns(self._queue, self._make_queue, has_classes=self._has_classes)
            else:
                self._queue.account = account
        if self._turns is None:
            self._queue.weight = account.weight
            self._queue.push(arrival, seq)
        else:
            self._turns.push(arrival, seq, account)
        self._sequences[seq] = None
        self.num_next += 1
        if is_new:
            self.num_new_tokens += seq.num_limited_tokens

    def next(
        self, now: float, num_cached_tokens: NumCachedTokens, keeps_share: KeepsShare = _keeps_any_share
    ) -> Sequence:
        """The next sequence of those that are not set aside; there must be one.

        It stays the same until it leaves or one that goes before it is added; with several tenants only while its own
        stays within its share with it, or others would wait for what it may not take. One that was admitted before also
        gives way to one of its tenant that has aged. `num_cached_tokens` is called for LONGEST_PREFIX only, for at most
        `WINDOW` sequences of a tenant, and not while the one it chose still waits; `keeps_share` only with several
        tenants, and for what is held.
        """
        if self.held is not None:
            if keeps_share(self.held) and not self._is_outranked(self.held, Look(now, num_cached_tokens, keeps_share)):
                return self.held
            self.held = None
        if self._turns is not None:
            return self._turns.next(Look(now, num_cached_tokens, keeps_share))
        return self._queue.first(now, num_cached_tokens)

    def hold(self, seq: Sequence) -> None:
        """Keep a waiting sequence the next one until it leaves.

        It gives way only to a more urgent class, or when it would exceed its tenant's share, which others may make
        smaller.
        """
        assert seq in self._sequences
        self.held = seq

    def choose_again(self) -> None:
        """Let `next` choose by the counters that tenants have now; what is held stays."""
        if self._turns is not None:
            self._turns.end_turn()

    def try_set_aside(self, seq: Sequence, now: float) -> bool:
        """Let others pass the next sequence until `bring_back`, because it waits for a step in flight.

        Returns:
            False, with nothing changed, if it has aged, was admitted before or is held, or `MAX_ASIDE` are set aside.
        """
        queue = self._queue if self._turns is None else self._turns.queue_of(seq)
        num_aside = len(self._sequences) - self.num_next
        if num_aside == MAX_ASIDE or seq is self.held or seq.was_admitted or queue.has_aged(seq, now):
            return False
        self._aside_ages_at = min(self._aside_ages_at, queue.set_aside(seq))
        self.num_next -= 1
        if self._turns is not None:
            self._turns.note_less(queue)
        return True

    def bring_back(self) -> None:
        """Let all that was set aside go on at its place."""
        if self.num_next == len(self._sequences):
            return
        (self._queue if self._turns is None else self._turns).bring_back()
        self.num_next, self._aside_ages_at = len(self._sequences), math.inf

    def bring_back_aged(self, now: float) -> None:
        """As `bring_back`, once any of what was set aside has aged."""
        if self._aside_ages_at < now:
            self.bring_back()

    def take(self, seq: Sequence, now: float) -> None:
        """Take out a sequence that is being admitted.

        Only newcomers count towards the drain rate: a refused client waits for their places.
        """
        is_new = not seq.was_admitted
        if self._turns is not None:
            self._turns.end_turn()
        self.remove(seq, now)
        if is_new:
            self._drain_rate.note(1, now)

    def remove(self, seq: Sequence, now: float) -> None:
        """Take out a sequence that is being admitted, has ended or waits elsewhere."""
        if seq is self.held:
            self.held = None
        queue = self._queue if self._turns is None else self._turns.queue_of(seq)
        del self._sequences[seq]
        self.num_next -= seq not in queue.aside
        if self._turns is None:
            queue.remove(seq)
        else:
            self._turns.remove(seq)
            if self._turns.are_over:
                self._queue, self._turns = next(iter(self._turns.by_tenant.values()), queue), None
        account = queue.account
        account.num_waiting -= 1
        if self.tenants.are_shared and not account.num_waiting:
            self.tenants.end_to_wait(account)
        if not seq.was_admitted:
            self.num_new_tokens -= seq.num_limited_tokens
        seq.waited_s += now - seq.queued_at
        seq.dequeued_at = now

    def is_aged(self, seq: Sequence, now: float) -> bool:
        """Whether it has aged; for a running one, whether it had when admitted."""
        if seq not in self._sequences:
            return seq.waited_s > self._max_age_s
        return (self._queue if self._turns is None else self._turns.queue_of(seq)).has_aged(seq, now)

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        num_new_tokens = sum(seq.num_limited_tokens for seq in self if not seq.was_admitted)
        assert self.num_new_tokens == num_new_tokens, "the waiting queue's tokens"
        assert self.held is None or self.held in self._sequences, "what is held does not wait"
        assert sum(len(queue.arrivals) for queue in self.queues) == len(self), "the waiting queue's places"
        assert self.num_next == len(self) - sum(len(queue.aside) for queue in self.queues), "what is set aside"
        for queue in self.queues:
            assert all(seq.tenant_number == queue.account.number for seq in queue.arrivals), "a tenant's sequences"
            assert all(seq in self._sequences for seq in queue.arrivals), "the waiting queue's places"
            assert self.held not in queue.aside, "what is held is set aside"
            queue.check_integrity()
        if self._turns is not None:
            self._turns.check_integrity()
        if self:
            assert self.oldest_arrived_at() == min(seq.arrived_at for seq in self), "the oldest that waits"

    def _is_outranked(self, seq: Sequence, look: Look) -> bool:
        """Whether a more urgent class than that of a waiting sequence waits."""
        if not self._has_classes:
            return False
        if self._turns is not None:
            return self._turns.is_outranked(seq, look)
        first = self._queue.first_class(look.now, look.num_cached_tokens)
        return first < self._queue.class_of(seq, look.now)


def _make_queue(policy: QueuePolicy, max_age_s: float, account: TenantAccount) -> TenantQueue:
    return TenantQueue(account, _ORDERS[policy](), max_age_s)
