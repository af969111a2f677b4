"""Which domains must be drained, and what an engine may still do with them, derived independently."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from services.scheduler.core.batch.sequence import RequestKey
from shared.ids import DpRank
from tests.simulation.watches.epoch_watch import EpochWatch
from tests.simulation.workload import CellSettings


@dataclass(slots=True)
class _Drain:
    ends_at: float
    """From then on no step is sent."""
    requests: set[RequestKey]
    """Those that were there when it began."""
    is_leaving: bool = False
    is_withdrawn: bool = False

    @property
    def is_departing(self) -> bool:
        """Whether the workers, or their endpoint, are about to go."""
        return self.is_leaving or self.is_withdrawn


class DrainWatch:
    """Follows the domains that take no new sequences, because they are leaving or an operator drains them."""

    def __init__(self, settings: CellSettings, epochs: Mapping[int, EpochWatch]) -> None:
        """`epochs` are those of the attached ranks; the caller changes it."""
        self._topology = settings.topology
        self._drain_s = settings.policy.drain_s
        self._epochs = epochs
        self._drained_by_operator: set[int] = set()
        # By domain; only attached ones.
        self._drains: dict[int, _Drain] = {}

    def __bool__(self) -> bool:
        return bool(self._drains)

    def is_departing(self, domain: int) -> bool:
        """Whether a domain's workers have said that they are leaving, or its endpoint is terminating or gone."""
        return domain in self._drains and self._drains[domain].is_departing

    def is_draining(self, rank: int) -> bool:
        """Whether an attached rank takes no new sequences."""
        return self._topology.domain_of(DpRank(rank)) in self._drains

    def attach(self, rank: DpRank) -> None:
        """A rank's domain is attached, without sequences."""
        domain = self._topology.domain_of(rank)
        if domain in self._drained_by_operator:
            self._drains[domain] = _Drain(math.inf, set())

    def leave(self, rank: DpRank, entering: set[RequestKey], now: float) -> None:
        """A rank has said that it is leaving; `entering` entered its batch before, with this event."""
        self._begin(self._topology.domain_of(rank), entering, now).is_leaving = True

    def withdraw(self, rank: DpRank, entering: set[RequestKey], now: float) -> None:
        """An attached rank's endpoint is terminating or gone; see `leave`."""
        self._begin(self._topology.domain_of(rank), entering, now).is_withdrawn = True

    def restore(self, rank: DpRank) -> None:
        """Its endpoint is there."""
        domain = self._topology.domain_of(rank)
        if domain in self._drains:
            self._drains[domain].is_withdrawn = False
            self._end_unless_wanted(domain)

    def drain(self, rank: DpRank, entering: set[RequestKey], now: float) -> None:
        """An operator drains a rank; see `leave`."""
        domain = self._topology.domain_of(rank)
        self._drained_by_operator.add(domain)
        if rank in self._epochs:
            self._begin(domain, entering, now)

    def undrain(self, rank: DpRank) -> None:
        """An operator takes it back."""
        domain = self._topology.domain_of(rank)
        self._drained_by_operator.discard(domain)
        self._end_unless_wanted(domain)

    def end(self, domain: int) -> None:
        """A domain's epoch has ended."""
        self._drains.pop(domain, None)

    def check_step(self, rank: DpRank, entering: set[RequestKey], suspects: set[RequestKey], now: float) -> None:
        """Check a step with which requests enter a rank's batch.

        Suspects are tried there all the same. One that is cleared stays with those of its choices that still wait.
        """
        drain = self._drains.get(self._topology.domain_of(rank))
        if drain is not None:
            assert now < drain.ends_at, "a step is sent to a domain after its drain time"
            drain.requests |= entering & suspects
            assert entering <= drain.requests, "a domain gets a new sequence although it drains"

    def check_release(self, domain: int, now: float) -> bool:
        """Check that a domain may be released; returns whether sequences may be left on it."""
        drain = self._drains.get(domain)
        assert drain is not None, "a domain is released that does not drain"
        assert not any(epoch.in_flight for epoch in self._epochs_of(domain)), (
            "a domain is released with a step in flight"
        )
        is_over = now >= drain.ends_at
        assert is_over or drain.is_departing, "a drained domain is released although its workers stay"
        return is_over

    def check(self, now: float) -> None:
        """Check that no drain is overdue."""
        for domain, drain in self._drains.items():
            is_quiet = not any(epoch.in_flight for epoch in self._epochs_of(domain))
            is_overdue = drain.is_departing and is_quiet and now >= drain.ends_at
            assert not is_overdue, "a domain is not released although its drain is over"

    def _end_unless_wanted(self, domain: int) -> None:
        if not self.is_departing(domain) and domain not in self._drained_by_operator:
            self._drains.pop(domain, None)

    def _begin(self, domain: int, entering: set[RequestKey], now: float) -> _Drain:
        there = entering.union(*(epoch.requests for epoch in self._epochs_of(domain)))
        return self._drains.setdefault(domain, _Drain(now + self._drain_s, there))

    def _epochs_of(self, domain: int) -> Iterator[EpochWatch]:
        return (self._epochs[rank] for rank in self._topology.ranks_of(domain) if rank in self._epochs)
