"""The waiting queue of a rank."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterator

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.queue.drain_rate import MAX_DELAY_S, DrainRate
from services.scheduler.core.queue.queue_order import (
    ArrivalOrder,
    NumCachedTokens,
    PrefixOrder,
    PriorityOrder,
    QueueOrder,
)
from services.scheduler.core.queue.tenant_classes import TenantClasses
from services.scheduler.core.queue.tenant_counters import AccountHeap, TenantCounters
from services.scheduler.core.queue.tenant_queue import TenantQueue
from shared.tenant import Tenant


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

KeepsShare = Callable[[Sequence], bool]
"""Whether a waiting sequence, once admitted, leaves its tenant within its share of the rank."""


# Each one that is set aside is looked up when it is, and again after the step that it waits for.
MAX_ASIDE = 128


def _keeps_any_share(_: Sequence) -> bool:
    return True


class WaitingQueue:
    """The waiting sequences of a rank, and which of them is next.

    With one tenant, the order is that of `TenantQueue`: aged sequences first, by arrival, under any policy, so none
    starves; then the policy's. With several, the next one is found by:

    1. under the priority policy, the most urgent class; an aged sequence counts as most urgent;
    2. sequences that were admitted before and whose tenant stays within its share of the rank with them, by arrival.
       (Without that limit, what a flood lost would go ahead of the tenant that it made way for.);
    3. the tenant with the lowest counter; within it, what is next with one tenant.

    Arrival is by `arrived_at`, so a preempted or resubmitted sequence keeps its place; ties go to those admitted
    before, then to the first added.

    A newcomer that waits for a step in flight is set aside until that step has returned or it turns aged. It keeps its
    place and counts as waiting, but others may pass it.

    The clock never goes back. While a sequence waits, its priority and its times do not change.

    Invariant: each waiting sequence is in its tenant's queue, and no such queue is empty. `num_new_tokens` are the
    prompt tokens of the leaders among those that were never admitted. `_accounts` are those of the queues in which not
    all is set aside, and `_weight` is the sum of the weights of all. `held` waits here, and is not set aside.
    `_num_aside` counts what is.
    """

    def __init__(
        self,
        policy: QueuePolicy,
        max_age_s: float,
        tenants: TenantCounters | None = None,
    ) -> None:
        """Make an empty queue; `tenants` are those of the cell."""
        self.num_new_tokens = 0
        self.held: Sequence | None = None
        """The next one, whatever comes, because others made way for it; see `hold`."""
        self.tenants = TenantCounters() if tenants is None else tenants
        self._policy = policy
        self._has_classes = policy is QueuePolicy.PRIORITY
        self._max_age_s = max_age_s
        # The queue of each, in the order in which they were added.
        self._queues: dict[Sequence, TenantQueue] = {}
        self._by_tenant: dict[int, TenantQueue] = {}
        self._classes = TenantClasses(self._by_tenant)
        # The tenants with sequences that were admitted before.
        self._with_returned: dict[int, TenantQueue] = {}
        self._accounts = AccountHeap()
        self._weight = 0.0
        # The queue that `next` chose, and the sequence in it if that is not the first there; until it leaves.
        self._choice: tuple[TenantQueue, Sequence | None] | None = None
        # Whether something was added that may go before the choice.
        self._may_change = False
        self._num_added = 0
        self._num_aside = 0
        # When the first of those that are set aside turns aged, or earlier.
        self._aside_ages_at = math.inf
        self._drain_rate = DrainRate()

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they were added."""
        return iter(self._queues)

    @property
    def has_next(self) -> bool:
        """Whether any sequence is not set aside."""
        return len(self._queues) > self._num_aside

    @property
    def tenant_numbers(self) -> Collection[int]:
        """The accounts' numbers of the tenants that wait here."""
        return self._by_tenant.keys()

    def oldest_arrived_at(self) -> float:
        """The earliest arrive time; the queue must not be empty."""
        return min(queue.oldest_arrived_at() for queue in self._by_tenant.values())

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
        account = self.tenants.account_of(tenant)
        own = self._by_tenant.get(account.number)
        if own is not None and len(self._by_tenant) == 1:
            return load
        own_load = 0 if own is None else own.num_new_tokens + tokens_per_seq * len(own.arrivals)
        other_weight = self._weight - (0.0 if own is None else own.weight)
        share = (own_load + num_tokens) * other_weight / account.weight
        return own_load + min(load - own_load, share)

    def add(self, seq: Sequence, now: float) -> None:
        """Add a sequence at its place."""
        seq.queued_at = now
        self._num_added += 1
        is_new = not seq.was_admitted
        account = self.tenants.account_of(seq.tenant)
        seq.tenant_number = account.number
        self.tenants.begin_to_wait(account)
        queue = self._by_tenant.get(account.number)
        if queue is None:
            queue = self._by_tenant[account.number] = TenantQueue(account, _ORDERS[self._policy](), self._max_age_s)
        if not queue.has_next:
            self._accounts.add(account)
        self._weight += account.weight - queue.weight
        queue.weight = account.weight
        queue.push((seq.arrived_at, is_new, self._num_added), seq)
        self._queues[seq] = queue
        if not is_new:
            self._with_returned[account.number] = queue
        self._may_change |= not is_new or self._has_classes
        if self._has_classes:
            self._classes.note_change(account.number)
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
        tenants.

        With several tenants it takes O(log tenants), and a choice also O(tenants with sequences that were admitted
        before), of which there are no more than the rank has slots unless ranks or schedulers were lost.
        """
        if self.held is not None:
            if keeps_share(self.held) and not self._is_outranked(self.held, now, num_cached_tokens):
                return self.held
            self.held = None
        if len(self._by_tenant) == 1:
            (queue,) = self._by_tenant.values()
            return queue.first(now, num_cached_tokens)
        if self._choice is not None and not self._stays(self._choice, now, num_cached_tokens, keeps_share):
            self._choice = None
        if self._choice is None or self._may_change:
            self._choice = self._choose(now, num_cached_tokens, keeps_share)
            self._may_change = False
        return self._chosen(self._choice, now, num_cached_tokens)

    def hold(self, seq: Sequence) -> None:
        """Keep a waiting sequence the next one until it leaves.

        It gives way only to a more urgent class, or when it would exceed its tenant's share, which others may make
        smaller.
        """
        assert seq in self._queues
        self.held = seq

    def try_set_aside(self, seq: Sequence, now: float) -> bool:
        """Let others pass the next sequence until `bring_back`, because it waits for a step in flight.

        Returns:
            False, with nothing changed, if it has aged, was admitted before or is held, or `MAX_ASIDE` are set aside.
        """
        queue = self._queues[seq]
        if self._num_aside == MAX_ASIDE or seq is self.held or seq.was_admitted or queue.has_aged(seq, now):
            return False
        self._aside_ages_at = min(self._aside_ages_at, queue.set_aside(seq))
        self._num_aside += 1
        self._note_less(queue)
        return True

    def bring_back(self) -> None:
        """Let all that was set aside go on at its place."""
        if not self._num_aside:
            return
        for number, queue in self._by_tenant.items():
            if not queue.aside:
                continue
            if not queue.has_next:
                self._accounts.add(queue.account)
            queue.bring_back()
            if self._has_classes:
                self._classes.note_change(number)
        self._num_aside, self._aside_ages_at = 0, math.inf
        self._may_change |= self._has_classes

    def bring_back_aged(self, now: float) -> None:
        """As `bring_back`, once any of what was set aside has aged."""
        if self._aside_ages_at < now:
            self.bring_back()

    def take(self, seq: Sequence, now: float) -> None:
        """Take out a sequence that is being admitted.

        Only newcomers count towards the drain rate: a refused client waits for their places.
        """
        is_new = not seq.was_admitted
        self._choice = None
        self._leave(seq, now)
        if is_new:
            self._drain_rate.note(1, now)

    def remove(self, seq: Sequence, now: float) -> None:
        """Take out a sequence that ended or waits elsewhere."""
        self._leave(seq, now)

    def is_aged(self, seq: Sequence, now: float) -> bool:
        """Whether it has aged; for a running one, whether it had when admitted."""
        queue = self._queues.get(seq)
        return seq.waited_s > self._max_age_s if queue is None else queue.has_aged(seq, now)

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        num_new_tokens = sum(seq.num_limited_tokens for seq in self if not seq.was_admitted)
        assert self.num_new_tokens == num_new_tokens, "the waiting queue's tokens"
        assert self.held is None or self.held in self._queues, "what is held does not wait"
        assert sum(len(queue.arrivals) for queue in self._by_tenant.values()) == len(self), "the waiting queue's places"
        assert all(seq in queue.arrivals for seq, queue in self._queues.items()), "the waiting queue's places"
        assert self._num_aside == sum(len(queue.aside) for queue in self._by_tenant.values()), "what is set aside"
        for number, queue in self._by_tenant.items():
            assert queue.arrivals, "a tenant's queue is empty"
            assert queue.has_next == (queue.account in self._accounts), "tenants with a next sequence"
            assert self.held not in queue.aside, "what is held is set aside"
            assert bool(queue.returned) == (number in self._with_returned), "tenants with returned sequences"
            queue.check_integrity()
        self._accounts.check_integrity()
        weight = sum(queue.weight for queue in self._by_tenant.values())
        assert abs(self._weight - weight) <= 1e-6 * weight, "the weight of those that wait"
        if self:
            assert self.oldest_arrived_at() == min(seq.arrived_at for seq in self), "the oldest that waits"

    @staticmethod
    def _chosen(
        choice: tuple[TenantQueue, Sequence | None], now: float, num_cached_tokens: NumCachedTokens
    ) -> Sequence:
        queue, returned = choice
        return queue.first(now, num_cached_tokens) if returned is None else returned

    def _choose(
        self, now: float, num_cached_tokens: NumCachedTokens, keeps_share: KeepsShare
    ) -> tuple[TenantQueue, Sequence | None]:
        """The next sequence's queue, and the sequence if it goes before what is first there."""
        priority, lowest = None, self._accounts.lowest()
        if self._has_classes:
            priority, lowest = self._classes.most_urgent(now, num_cached_tokens)
        assert lowest is not None
        returned = []
        for number, queue in self._with_returned.items():
            if priority is None or self._classes.is_in(number, priority):
                seq = self._first_returned(queue, now, num_cached_tokens)
                if seq is not None and keeps_share(seq):
                    returned.append((queue.arrivals[seq], queue, seq))
        if returned:
            _, queue, seq = min(returned)
            return queue, seq
        if self._choice is not None and self._choice[1] is None:
            number = self._choice[0].account.number
            if priority is None or self._classes.is_in(number, priority):
                return self._choice
        return self._by_tenant[lowest.number], None

    def _stays(
        self,
        choice: tuple[TenantQueue, Sequence | None],
        now: float,
        num_cached_tokens: NumCachedTokens,
        keeps_share: KeepsShare,
    ) -> bool:
        """Whether what was chosen may still be next: one of a class only until another of its tenant has aged."""
        queue, seq = choice
        if self._has_classes and seq is not None and queue.first(now, num_cached_tokens) is not seq:
            return False
        return keeps_share(self._chosen(choice, now, num_cached_tokens))

    def _is_outranked(self, seq: Sequence, now: float, num_cached_tokens: NumCachedTokens) -> bool:
        """Whether a more urgent class than that of a waiting sequence waits."""
        if not self._has_classes:
            return False
        most_urgent, _ = self._classes.most_urgent(now, num_cached_tokens)
        return most_urgent < self._queues[seq].class_of(seq, now)

    def _first_returned(self, queue: TenantQueue, now: float, num_cached_tokens: NumCachedTokens) -> Sequence | None:
        """The first of a tenant's sequences that were admitted before, if it is of the most urgent class there."""
        if not self._has_classes:
            return queue.returned.top[1]
        first = queue.first(now, num_cached_tokens)
        return first if first in queue.returned else None

    def _leave(self, seq: Sequence, now: float) -> None:
        if seq is self.held:
            self.held = None
        queue = self._queues.pop(seq)
        self._num_aside -= seq in queue.aside
        had_next = queue.has_next
        queue.remove(seq)
        self.tenants.end_to_wait(queue.account)
        if not queue.returned:
            self._with_returned.pop(queue.account.number, None)
        if not queue.arrivals:
            del self._by_tenant[queue.account.number]
            self._weight = self._weight - queue.weight if self._by_tenant else 0.0
        if had_next:
            self._note_less(queue)
        if self._choice is not None and self._choice[1] is seq:
            self._choice = None
        if not seq.was_admitted:
            self.num_new_tokens -= seq.num_limited_tokens
        seq.waited_s += now - seq.queued_at
        seq.dequeued_at = now

    def _note_less(self, queue: TenantQueue) -> None:
        """One that could be next has left a queue or was set aside."""
        if self._has_classes:
            self._classes.note_change(queue.account.number)
        if queue.has_next:
            return
        self._accounts.remove(queue.account)
        if self._choice is not None and self._choice[0] is queue:
            self._choice = None
