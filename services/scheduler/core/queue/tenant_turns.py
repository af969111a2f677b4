"""Whose turn it is among several tenants that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.queue.queue_order import Key, NumCachedTokens
from services.scheduler.core.queue.tenant_classes import TenantClasses
from services.scheduler.core.queue.tenant_counters import AccountHeap, TenantAccount
from services.scheduler.core.queue.tenant_queue import TenantQueue

KeepsShare = Callable[[Sequence], bool]
"""Whether a waiting sequence, once admitted, leaves its tenant within its share of the rank."""


class Look(NamedTuple):
    """What a look for the next sequence goes by."""

    now: float
    num_cached_tokens: NumCachedTokens
    keeps_share: KeepsShare


class _Choice(NamedTuple):
    queue: TenantQueue
    returned: Sequence | None
    """The sequence, if it goes before what is first in the queue."""

    def sequence(self, look: Look) -> Sequence:
        return self.queue.first(look.now, look.num_cached_tokens) if self.returned is None else self.returned


class TenantTurns:
    """The queues of the tenants that wait, and the one that is next.

    It is found by:

    1. under the priority policy, the most urgent class; an aged sequence counts as most urgent;
    2. sequences that were admitted before and whose tenant stays within its share of the rank with them, by arrival.
       (Without that limit, what a flood lost would go ahead of the tenant that it made way for.);
    3. the tenant with the lowest counter; within it, what is next in its queue.

    Invariant: no queue of `by_tenant` is empty. `weight` is the sum of their weights, `_accounts` has the accounts of
    those in which not all is set aside, and `_with_returned` has the queues with sequences that were admitted before.
    """

    def __init__(
        self, queue: TenantQueue, make_queue: Callable[[TenantAccount], TenantQueue], *, has_classes: bool
    ) -> None:
        """Begin with the queue of the one tenant that waits."""
        self.by_tenant = {queue.account.number: queue}
        self.weight = queue.weight
        self._make_queue = make_queue
        self._classes = TenantClasses(self.by_tenant) if has_classes else None
        self._with_returned: dict[int, TenantQueue] = {}
        self._accounts = AccountHeap()
        # What `next` chose, until it leaves.
        self._choice: _Choice | None = None
        # Whether something was added that may go before the choice.
        self._may_change = False
        if queue.returned:
            self._with_returned[queue.account.number] = queue
        if queue.has_next:
            self._accounts.add(queue.account)
        self._note_change(queue)

    @property
    def are_over(self) -> bool:
        """Whether no more than one tenant is left, and nothing is chosen."""
        return len(self.by_tenant) <= 1 and self._choice is None

    def queue_of(self, seq: Sequence) -> TenantQueue:
        """The queue of a waiting sequence's tenant."""
        return self.by_tenant[seq.tenant_number]

    def push(self, arrival: Key, seq: Sequence, account: TenantAccount) -> None:
        """Add a sequence of a tenant."""
        queue = self.by_tenant.get(account.number)
        if queue is None:
            queue = self.by_tenant[account.number] = self._make_queue(account)
        if not queue.has_next:
            self._accounts.add(account)
        self.weight += account.weight - queue.weight
        queue.weight = account.weight
        queue.push(arrival, seq)
        if seq.was_admitted:
            self._with_returned[account.number] = queue
        self._may_change |= seq.was_admitted or self._classes is not None
        self._note_change(queue)

    def next(self, look: Look) -> Sequence:
        """The next sequence of those that are not set aside; there must be one.

        It takes O(log tenants), and a choice also O(tenants with sequences that were admitted before), of which there
        are no more than the rank has slots unless ranks or schedulers were lost.
        """
        if len(self.by_tenant) == 1:
            (queue,) = self.by_tenant.values()
            return queue.first(look.now, look.num_cached_tokens)
        if self._choice is not None and not self._stays(self._choice, look):
            self._choice = None
        if self._choice is None or self._may_change:
            self._choice = self._choose(look)
            self._may_change = False
        return self._choice.sequence(look)

    def is_outranked(self, seq: Sequence, look: Look) -> bool:
        """Whether a more urgent class than that of a waiting sequence waits."""
        if self._classes is None:
            return False
        most_urgent, _ = self._classes.most_urgent(look.now, look.num_cached_tokens)
        return most_urgent < self.queue_of(seq).class_of(seq, look.now)

    def end_turn(self) -> None:
        """Forget what was chosen: it is being admitted, or the counters are to be looked at again."""
        self._choice = None

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence."""
        queue = self.queue_of(seq)
        had_next = queue.has_next
        queue.remove(seq)
        if not queue.returned:
            self._with_returned.pop(queue.account.number, None)
        if not queue.arrivals:
            del self.by_tenant[queue.account.number]
            self.weight -= queue.weight
        if had_next:
            self.note_less(queue)
        if self._choice is not None and self._choice.returned is seq:
            self._choice = None

    def note_less(self, queue: TenantQueue) -> None:
        """Note that one that could be next has left a queue or was set aside."""
        self._note_change(queue)
        if queue.has_next:
            return
        self._accounts.remove(queue.account)
        if self._choice is not None and self._choice.queue is queue:
            self._choice = None

    def bring_back(self) -> None:
        """Let all that was set aside go on at its place."""
        for queue in self.by_tenant.values():
            if queue.aside:
                if not queue.has_next:
                    self._accounts.add(queue.account)
                queue.bring_back()
                self._note_change(queue)
        self._may_change |= self._classes is not None

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        for number, queue in self.by_tenant.items():
            assert queue.arrivals, "a tenant's queue is empty"
            assert number == queue.account.number, "a tenant's account"
            assert queue.has_next == (queue.account in self._accounts), "tenants with a next sequence"
            assert bool(queue.returned) == (number in self._with_returned), "tenants with returned sequences"
        self._accounts.check_integrity()
        weight = sum(queue.weight for queue in self.by_tenant.values())
        assert abs(self.weight - weight) <= 1e-6 * weight, "the weight of those that wait"

    def _choose(self, look: Look) -> _Choice:
        priority: Priority | None = None
        lowest = self._accounts.lowest()
        if self._classes is not None:
            priority, lowest = self._classes.most_urgent(look.now, look.num_cached_tokens)
        assert lowest is not None
        returned = []
        for queue in self._with_returned.values():
            if self._is_in(queue, priority):
                seq = self._first_returned(queue, look)
                if seq is not None and look.keeps_share(seq):
                    returned.append((queue.arrivals[seq], queue, seq))
        if returned:
            _, queue, seq = min(returned)
            return _Choice(queue, seq)
        if self._choice is not None and self._choice.returned is None and self._is_in(self._choice.queue, priority):
            return self._choice
        return _Choice(self.by_tenant[lowest.number], None)

    def _stays(self, choice: _Choice, look: Look) -> bool:
        """Whether what was chosen may still be next: one of a class only until another of its tenant has aged."""
        queue, seq = choice
        if self._classes is not None and seq is not None and queue.first(look.now, look.num_cached_tokens) is not seq:
            return False
        return look.keeps_share(choice.sequence(look))

    def _first_returned(self, queue: TenantQueue, look: Look) -> Sequence | None:
        """The first of a tenant's sequences that were admitted before, if it is of the most urgent class there."""
        if self._classes is None:
            return queue.returned.top[1]
        first = queue.first(look.now, look.num_cached_tokens)
        return first if first in queue.returned else None

    def _is_in(self, queue: TenantQueue, priority: Priority | None) -> bool:
        """Whether a tenant's next sequence is of a class; None for any."""
        return priority is None or self._classes is None or self._classes.is_in(queue.account.number, priority)

    def _note_change(self, queue: TenantQueue) -> None:
        if self._classes is not None:
            self._classes.note_change(queue.account.number)
