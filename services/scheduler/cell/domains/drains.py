"""Empties the domains whose ranks are about to stop."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.cell.domains.domain import Domain


class Drains:
    """Decides when a draining domain's epoch ends.

    A domain drains because its workers were asked to end or its endpoint is withdrawn, or because an operator asked for
    it. It takes no new sequences, and those that it computes have `drain_s` to finish:

        begins                          drain_s later
        |--- sequences finish ----------|--- steps in flight return ---| the epoch ends: the rest continue elsewhere

    The epoch ends earlier when no sequence is left, unless only the operator asked: the workers then stay attached.

    Invariant: only attached domains that drain have a deadline; one that is empty and not departing has none.
    """

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._domain_to_deadline: dict[Domain, float] = {}

    def __bool__(self) -> bool:
        return bool(self._domain_to_deadline)

    def try_begin(self, domain: Domain, now: float) -> bool:
        """Begin to drain an attached domain; False if it drains already."""
        if domain in self._domain_to_deadline:
            return False
        self._domain_to_deadline[domain] = now + self._drain_s
        return True

    def end(self, domain: Domain) -> None:
        """The domain's epoch has ended, or it takes sequences again."""
        self._domain_to_deadline.pop(domain, None)
        domain.is_ending = False

    def take_over(self, now: float) -> list[Domain]:
        """The domains whose epochs are to end now; no step of theirs is in flight."""
        over = []
        for domain, deadline in list(self._domain_to_deadline.items()):
            if domain.is_empty and not domain.is_departing:
                self.end(domain)
                continue
            domain.is_ending = now >= deadline
            if domain.is_empty or (domain.is_ending and domain.is_quiet):
                self.end(domain)
                over.append(domain)
        return over

    def check_integrity(self, domains: Iterable[Domain]) -> None:
        """Assert the class's invariant, between two events."""
        draining = self._domain_to_deadline.keys()
        assert all(domain.epoch is not None and domain.is_draining for domain in draining), "a drain without an epoch"
        for domain in domains:
            assert domain in draining or not domain.is_ending, "a domain sends no steps although it does not drain"
            is_left = domain.epoch is not None and domain.is_draining and domain not in draining
            assert not is_left or (domain.is_empty and not domain.is_departing), "a drain without a deadline"
