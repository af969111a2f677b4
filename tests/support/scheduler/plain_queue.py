"""The order of waiting sequences, found by looking at all of them: a reference for `WaitingQueue`."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.batch.sequence import Priority, Sequence
from services.scheduler.core.queue.tenant_turns import KeepsShare
from shared.tenants.tenant import Tenant
from tests.support.scheduler.waiting import MAX_AGE_S


@dataclass
class PlainQueue:
    """A queue in which nothing depends on how many tenants there are.

    Every tenant has a counter for ever, and is charged for everything.
    """

    has_classes: bool
    counters: dict[Tenant, float] = field(default_factory=dict)
    """In the order in which the tenants came, by which ties go."""
    arrivals: dict[Sequence, tuple[float, bool, int]] = field(default_factory=dict)
    last_waiting: Tenant | None = None
    choice: tuple[Tenant, Sequence | None] | None = None
    may_change: bool = False
    num_added: int = 0

    def add(self, seq: Sequence) -> None:
        """Add a sequence, whose tenant is lifted to the others if it has none waiting."""
        tenants = self._tenants()
        of_last = [] if self.last_waiting is None else [self.last_waiting]
        standard = [self.counters[tenant] for tenant in tenants or of_last]
        self.counters.setdefault(seq.tenant, 0.0)
        if seq.tenant not in tenants and standard:
            self.counters[seq.tenant] = max(self.counters[seq.tenant], min(standard))
        self.num_added += 1
        self.arrivals[seq] = seq.arrived_at, not seq.was_admitted, self.num_added
        self.may_change |= seq.was_admitted or self.has_classes

    def charge(self, tenant: Tenant, cost: float) -> None:
        """Charge what was computed for a tenant."""
        self.counters[tenant] += cost / tenant.weight

    def remove(self, seq: Sequence, *, is_taken: bool) -> None:
        """Take out a sequence."""
        del self.arrivals[seq]
        if seq.tenant not in self._tenants():
            self.last_waiting = seq.tenant
        if self.choice is not None and (is_taken or self.choice[1] is seq or self.choice[0] not in self._tenants()):
            self.choice = None

    def next(self, now: float, keeps_share: KeepsShare) -> Sequence:
        """The next sequence; there must be one."""
        tenants = self._tenants()
        if len(tenants) == 1:
            return self._first(next(iter(tenants)), now)
        if self.choice is not None and not self._stays(*self.choice, now, keeps_share):
            self.choice = None
        if self.choice is None or self.may_change:
            self.choice = self._choose(now, keeps_share)
            self.may_change = False
        tenant, seq = self.choice
        return self._first(tenant, now) if seq is None else seq

    def _choose(self, now: float, keeps_share: KeepsShare) -> tuple[Tenant, Sequence | None]:
        classes = {tenant: self._class_of(self._first(tenant, now), now) for tenant in self._tenants()}
        urgent = [tenant for tenant, each in classes.items() if not self.has_classes or each is min(classes.values())]
        returned = [seq for seq in self.arrivals if seq.was_admitted and seq.tenant in urgent]
        first = [
            min((seq for seq in returned if seq.tenant == tenant), key=self.arrivals.__getitem__)
            for tenant in {seq.tenant for seq in returned}
        ]
        if self.has_classes:
            first = [seq for tenant in urgent if (seq := self._first(tenant, now)).was_admitted]
        first = [seq for seq in first if keeps_share(seq)]
        if first:
            seq = min(first, key=self.arrivals.__getitem__)
            return seq.tenant, seq
        if self.choice is not None and self.choice[1] is None and self.choice[0] in urgent:
            return self.choice
        numbers = list(self.counters)
        return min(urgent, key=lambda tenant: (self.counters[tenant], numbers.index(tenant))), None

    def _stays(self, tenant: Tenant, seq: Sequence | None, now: float, keeps_share: KeepsShare) -> bool:
        first = self._first(tenant, now)
        if self.has_classes and seq is not None and first is not seq:
            return False
        return keeps_share(first if seq is None else seq)

    def _first(self, tenant: Tenant, now: float) -> Sequence:
        """The first of a tenant: of those that have aged by arrival, else of all by class and arrival."""
        own = [seq for seq in self.arrivals if seq.tenant == tenant]
        aged = [seq for seq in own if _has_aged(seq, now)]
        if aged or not self.has_classes:
            return min(aged or own, key=self.arrivals.__getitem__)
        return min(own, key=lambda seq: (seq.priority, self.arrivals[seq]))

    def _class_of(self, seq: Sequence, now: float) -> Priority:
        return Priority.HIGH if _has_aged(seq, now) else seq.priority

    def _tenants(self) -> set[Tenant]:
        """The tenants that wait."""
        return {seq.tenant for seq in self.arrivals}


def _has_aged(seq: Sequence, now: float) -> bool:
    return seq.queued_at + (MAX_AGE_S - seq.waited_s) < now
