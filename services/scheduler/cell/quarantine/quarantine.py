"""Gives suspects a failure domain to themselves, one group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from services.scheduler.cell.domains.domain import Domain, Rank
from services.scheduler.cell.quarantine.suspects import Suspects
from services.scheduler.core.batch.sequence import RequestKey
from services.scheduler.core.policy import SchedulerCounters, SchedulerPolicy

TRIAL_DEPTH = 1


class Quarantine:
    """Decides which domain tries which suspects, and which requests may be on which rank in the meantime.

    A trial reserves its domain: no other request is there, and one step is in flight at a time. A domain that is idle,
    or whose trial is over, takes the next group at once. Since the lost domain may never return, a busy one takes a
    group that has waited for `suspect_patience_s` while no domain is reserved.

    Invariant: a reserved domain has a trial, or is held (sends no steps) until its steps in flight have returned and it
    can be emptied for one.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        policy: SchedulerPolicy,
        counters: SchedulerCounters,
        is_alive: Callable[[RequestKey], bool],
    ) -> None:
        self.suspects = Suspects()
        self._domains = domains
        self._policy = policy
        self._counters = counters
        self._is_alive = is_alive
        self._reserved: set[Domain] = set()
        self._has_opened = False

    def __bool__(self) -> bool:
        return bool(self.suspects) or bool(self._reserved)

    def open_ranks(self) -> list[Rank]:
        """The ranks that take requests which are not suspects."""
        return [
            rank
            for domain in self._domains
            if domain.epoch is not None and not domain.is_draining and domain not in self._reserved
            for rank in domain.ranks
        ]

    def ranks_for(self, request: RequestKey) -> list[Rank]:
        """The ranks that may take a request now; empty when it must wait."""
        if request not in self.suspects:
            return self.open_ranks()
        return [
            rank
            for domain in self._domains
            if self.suspects.is_tried_on(request, domain.number)
            for rank in domain.ranks
        ]

    def is_on(self, domain: Domain) -> bool:
        """Whether a domain has a trial."""
        return domain.number in self.suspects.trying_domains

    def on_attached(self, domain: Domain) -> None:
        """A domain was attached: it has no sequences and waits for steps."""
        domain.set_depth(self._policy.max_steps_in_flight)
        self.on_opened()

    def on_opened(self) -> None:
        """A domain may take sequences again."""
        self._has_opened = True

    def take_has_opened(self) -> bool:
        """Whether ranks were opened since the last call."""
        has_opened, self._has_opened = self._has_opened, False
        return has_opened

    def on_lost(self, domain: Domain, in_flight: list[RequestKey], now: float) -> RequestKey | None:
        """A domain was lost with these requests in its steps in flight; see `Suspects.accuse`."""
        self._reserved.discard(domain)
        poison = self.suspects.accuse(domain.number, in_flight, now)
        self._counters.num_poison_requests += poison is not None
        return poison

    def advance(self, now: float) -> Iterator[tuple[Domain, list[RequestKey]]]:
        """End trials that are over, and begin those that can begin.

        Yields:
            A domain without a step in flight, and the requests that must be alone on it now.
        """
        self.suspects.drop_ended({suspect for suspect in self.suspects.all() if not self._is_alive(suspect)})
        for domain in self._domains:
            if domain.epoch is None or self.is_on(domain):
                continue
            if self.suspects.next_group is None or domain.is_draining:
                self._release(domain)
            elif domain in self._reserved or domain.is_empty or self._may_disturb(now):
                self._reserved.add(domain)
                domain.is_held = not domain.is_quiet
                if domain.is_quiet:
                    domain.set_depth(TRIAL_DEPTH)
                    self._counters.num_suspect_trials += 1
                    yield domain, self.suspects.begin_trial(domain.number)

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        self.suspects.check_integrity()
        reserved = {domain.number for domain in self._reserved}
        assert set(self.suspects.trying_domains) <= reserved, "a trial that holds no domain"
        assert all(self.is_on(domain) or domain.is_held for domain in self._reserved), "a domain held without a trial"

    def _may_disturb(self, now: float) -> bool:
        """Whether the next group may take a busy domain."""
        group = self.suspects.next_group
        return group is not None and not self._reserved and now >= group.since + self._policy.suspect_patience_s

    def _release(self, domain: Domain) -> None:
        if domain in self._reserved:
            self._reserved.remove(domain)
            domain.is_held = False
            domain.set_depth(self._policy.max_steps_in_flight)
            self._has_opened = True
