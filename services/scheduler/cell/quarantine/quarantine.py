"""Gives suspects a failure domain to themselves, one group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from services.scheduler.cell.domains.domain import Control, Domain, Rank
from services.scheduler.cell.quarantine.suspects import Suspects
from services.scheduler.core.batch.sequence import RequestKey
from services.scheduler.core.policy import SchedulerCounters, SchedulerPolicy

TRIAL_DEPTH = 1
# A worker that fails at every n-th step fails within the most, or not in the few steps of a trial after the fewest.
_MOST_CONTROL_STEPS = 64
_FEWEST_CONTROL_STEPS = 8


class Quarantine:
    """Decides which domain tries which suspects, and which requests may be on which rank in the meantime.

    A trial reserves its domain: no other request is there, and one step is in flight at a time. A domain that is idle,
    or whose trial is over, takes the next group at once. Since the lost domain may never return, a busy one takes a
    group that has waited for `suspect_patience_s` while no domain is reserved.

    A worker that cannot compute would make all suspects guilty. So a domain is tried on only after a control: since the
    last crash, of any domain, it has returned at least 8 steps, and as many as an epoch had whose crash accused a
    suspect, if these were at most 64. They are other requests', or dummies with as many tokens as the suspects. A
    worker that fails at every n-th step so fails its control where it failed before.

        crash of {a b}   attached   dummies return   trial {a}: crash   attached   dummies return   {a}: guilty
                                    dummies fail: a and b are cleared, unless another domain's crash accused them

    Invariant: a reserved domain has a trial or a control, or is held (sends no steps) until its steps in flight have
    returned and it can be emptied for one.
    """

    def __init__(
        self,
        domains: Sequence[Domain],
        policy: SchedulerPolicy,
        counters: SchedulerCounters,
        is_alive: Callable[[RequestKey], bool],
        count_tokens: Callable[[list[RequestKey]], int],
    ) -> None:
        """No request is a suspect; `count_tokens` counts all tokens of requests that have no rank."""
        self.suspects = Suspects()
        self._count_tokens = count_tokens
        self._num_control_steps = _FEWEST_CONTROL_STEPS
        # The steps of their epochs that domains had returned at the last crash.
        self._num_returned_before: dict[Domain, int] = {}
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
        return [rank for domain in self._domains if self.is_open(domain) for rank in domain.ranks]

    def is_open(self, domain: Domain) -> bool:
        """Whether a domain's ranks take requests that are not suspects."""
        return domain.epoch is not None and not domain.is_draining and domain not in self._reserved

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
        self._num_returned_before.pop(domain, None)
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
        if domain.has_failed_control:
            self.suspects.acquit(domain.number)
        self._forget(domain)
        poison = self.suspects.accuse(domain.number, in_flight, now)
        if in_flight:
            if domain.num_steps_of_last_epoch <= _MOST_CONTROL_STEPS:
                self._num_control_steps = max(self._num_control_steps, domain.num_steps_of_last_epoch)
            self._num_returned_before = {other: other.num_returned_steps for other in self._domains}
        self._counters.num_poison_requests += poison is not None
        return poison

    def on_released(self, domain: Domain, now: float) -> None:
        """A domain's epoch has ended as planned, which says nothing about its suspects or its control."""
        self._forget(domain)
        self.suspects.accuse(domain.number, [], now)

    def advance(self, now: float) -> Iterator[tuple[Domain, list[RequestKey]]]:
        """End trials that are over, and begin those that can begin.

        Yields:
            A domain without a step in flight, and the requests that must be alone on it now; none before a control.
        """
        self.suspects.drop_ended({suspect for suspect in self.suspects.all() if not self._is_alive(suspect)})
        if not self.suspects:
            self._num_control_steps = _FEWEST_CONTROL_STEPS
        for domain in self._domains:
            if domain.epoch is None or self.is_on(domain):
                continue
            if self.suspects.next_group is None or domain.is_draining:
                self._release(domain)
            elif domain in self._reserved or domain.is_empty or self._may_disturb(now):
                self._reserved.add(domain)
                if domain.control is not None and domain.control.num_left:
                    continue
                domain.is_held = not domain.is_quiet
                if domain.is_quiet:
                    domain.set_depth(TRIAL_DEPTH)
                    yield domain, self._begin_on(domain, self.suspects.next_group.suspects)

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        self.suspects.check_integrity()
        reserved = {domain.number for domain in self._reserved}
        assert set(self.suspects.trying_domains) <= reserved, "a trial that holds no domain"
        is_due = [self.is_on(domain) or domain.is_held or domain.control is not None for domain in self._reserved]
        assert all(is_due), "a domain held without a trial"
        controlled = {domain for domain in self._domains if domain.control is not None}
        assert controlled <= self._reserved, "a control without a trial to come"

    def _begin_on(self, domain: Domain, next_suspects: list[RequestKey]) -> list[RequestKey]:
        """Begin a control or a trial on a quiet domain; the requests that are tried."""
        num_shown = domain.num_returned_steps - self._num_returned_before.get(domain, 0)
        if domain.control is None and domain.has_controls and num_shown < self._num_control_steps:
            domain.control = Control(self._num_control_steps - num_shown, self._count_tokens(next_suspects))
            return []
        domain.control = None
        self._counters.num_suspect_trials += 1
        return self.suspects.begin_trial(domain.number)

    def _may_disturb(self, now: float) -> bool:
        """Whether the next group may take a busy domain."""
        group = self.suspects.next_group
        return group is not None and not self._reserved and now >= group.since + self._policy.suspect_patience_s

    def _forget(self, domain: Domain) -> None:
        """Forget what a domain was doing, which has no epoch any more."""
        self._reserved.discard(domain)
        domain.control = None

    def _release(self, domain: Domain) -> None:
        if domain in self._reserved:
            self._reserved.remove(domain)
            domain.is_held, domain.control = False, None
            domain.set_depth(self._policy.max_steps_in_flight)
            self._has_opened = True
