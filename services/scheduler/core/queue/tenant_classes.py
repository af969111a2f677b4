"""The tenants that wait, by the class of what is next of each: for the policy `priority`."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from services.scheduler.core.batch.sequence import Priority
from services.scheduler.core.queue.queue_order import NumCachedTokens
from services.scheduler.core.queue.tenant_counters import AccountHeap, TenantAccount
from services.scheduler.core.queue.tenant_queue import TenantQueue

# The heap of times is built again once it has this many entries more than twice as many as there are tenants.
_MIN_STALE = 64


class TenantClasses:
    """Finds the most urgent class that waits and is not set aside, and the tenant with the lowest counter in it.

    The class of a tenant is that of its next sequence, an aged one being most urgent. It changes with the tenant's
    queue, which the waiting queue notes, and once, as time passes, when the tenant's first sequence turns aged. What
    was noted is put off until somebody asks, so it costs hardly anything while one tenant waits.

    Invariant: each tenant that was not noted since is in the heap of its class, and if nothing of it has aged, `_ages`
    has the time at which something will, with the same time in `_ages_at`.
    """

    def __init__(self, queues: Mapping[int, TenantQueue]) -> None:
        """`queues` are those that wait, by their tenants' numbers; those without a next sequence are left out."""
        self._queues = queues
        self._changed: set[int] = set()
        self._heaps = {priority: AccountHeap() for priority in sorted(Priority)}
        self._classes: dict[int, tuple[Priority, TenantAccount]] = {}
        self._ages: list[tuple[float, int]] = []
        self._ages_at: dict[int, float] = {}

    def note_change(self, number: int) -> None:
        """A sequence of a tenant has come or left."""
        self._changed.add(number)

    def most_urgent(self, now: float, num_cached_tokens: NumCachedTokens) -> tuple[Priority, TenantAccount]:
        """The most urgent class that waits, and the lowest account in it; some tenant must wait.

        O(log tenants), amortised, for each change.
        """
        while self._ages and self._ages[0][0] < now:
            self._changed.add(heapq.heappop(self._ages)[1])
        for number in self._changed:
            self._update(number, now, num_cached_tokens)
        self._changed.clear()
        return next(
            (priority, lowest) for priority, heap in self._heaps.items() if (lowest := heap.lowest()) is not None
        )

    def is_in(self, number: int, priority: Priority) -> bool:
        """Whether a tenant that waits is in a class; `most_urgent` must have been called since the last change."""
        return self._classes[number][0] is priority

    def _update(self, number: int, now: float, num_cached_tokens: NumCachedTokens) -> None:
        queue, before = self._queues.get(number), self._classes.pop(number, None)
        if queue is not None and not queue.has_next:
            queue = None
        priority = None if queue is None else queue.first_class(now, num_cached_tokens)
        if before is not None and before[0] is not priority:
            self._heaps[before[0]].remove(before[1])
        if queue is None or priority is None:
            self._ages_at.pop(number, None)
            return
        if before is None or before[0] is not priority:
            self._heaps[priority].add(queue.account)
        self._classes[number] = priority, queue.account
        self._note_age(number, queue.ages_at(now))

    def _note_age(self, number: int, ages_at: float | None) -> None:
        if ages_at is None:
            self._ages_at.pop(number, None)
        elif self._ages_at.get(number) != ages_at:
            self._ages_at[number] = ages_at
            heapq.heappush(self._ages, (ages_at, number))
            if len(self._ages) > 2 * len(self._ages_at) + _MIN_STALE:
                self._ages = [(time, each) for each, time in self._ages_at.items()]
                heapq.heapify(self._ages)
