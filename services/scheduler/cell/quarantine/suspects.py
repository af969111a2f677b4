"""Which requests are suspected of crashing a worker, and which of them a domain is trying.

Bookkeeping only: `quarantine` gives each trial its own ranks.
"""

from __future__ import annotations

from services.scheduler.core.batch.sequence import RequestKey
from shared.bisection import Bisection, Group, without


class Suspects:
    """Requests that were in a step that its worker did not survive, until one of their decode steps returns.

    A crash accuses the requests in its steps that had not returned. They are tried in halves (see `Bisection`), each
    alone on a failure domain; a decode step that returns clears its requests. Two unrelated crashes in a row can only
    condemn a request that was alone both times, without a decode step in between.

    The choices of a request are tried together: they share a prompt, and fail together.

    Before each trial there is a control. If it fails, the domain is sick, and what only its crashes accused is cleared.

    Invariant: a suspect is in exactly one group, which is either waiting or on trial on a domain. It has accusers.
    """

    def __init__(self) -> None:
        self._waiting: Bisection[RequestKey] = Bisection()
        self._trials: dict[int, Group[RequestKey]] = {}
        self._keys: set[RequestKey] = set()
        # The domains whose crashes accused a suspect since it is one.
        self._accusers: dict[RequestKey, set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __contains__(self, request: RequestKey) -> bool:
        return request in self._keys

    @property
    def next_group(self) -> Group[RequestKey] | None:
        """The group that is tried next; None when no group is waiting."""
        return self._waiting.next_group

    @property
    def trying_domains(self) -> list[int]:
        """The domains that have a trial."""
        return list(self._trials)

    def is_tried_on(self, request: RequestKey, domain: int) -> bool:
        """Whether a request is on trial on a domain."""
        trial = self._trials.get(domain)
        return trial is not None and request in trial.suspects

    def accuse(self, domain: int, requests: list[RequestKey], now: float) -> RequestKey | None:
        """A domain was lost with these requests in its steps that had not returned; its trial, if any, is over.

        Each request is named once; if there are none, none is accused.

        Returns:
            The request found to be poison, which is no longer a suspect; None if none was found.
        """
        trial = self._trials.pop(domain, None)
        if trial is not None:
            self._waiting.put_back(without(trial.suspects, set(requests)), now)
        poison = self._waiting.crash(requests, now)
        self._keys.update(requests)
        for request in requests:
            self._accusers.setdefault(request, set()).add(domain)
        if poison is not None:
            self._keys.remove(poison)
            del self._accusers[poison]
        return poison

    def acquit(self, domain: int) -> None:
        """A domain has failed its control: clear the suspects that no other domain's crash has accused."""
        self.drop_ended({request for request, accusers in self._accusers.items() if accusers == {domain}})

    def clear(self, domain: int, requests: set[RequestKey]) -> None:
        """Clear the requests of a domain's trial that were in a returned decode step, or that have ended."""
        trial = self._trials[domain]
        self._forget(requests.intersection(trial.suspects))
        left = without(trial.suspects, requests)
        if left:
            self._trials[domain] = Group(left, trial.since)
        else:
            del self._trials[domain]

    def begin_trial(self, domain: int) -> list[RequestKey]:
        """Put the next group on trial on a domain that has no trial; returns its requests."""
        group = self._trials[domain] = self._waiting.take()
        return group.suspects

    def drop_ended(self, ended: set[RequestKey]) -> None:
        """Forget requests that have ended."""
        for domain in self.trying_domains:
            self.clear(domain, ended)
        self._forget(ended)

    def all(self) -> set[RequestKey]:
        """All suspects."""
        return set(self._keys)

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        groups = [*self._waiting, *self._trials.values()]
        grouped = [request for group in groups for request in group.suspects]
        assert len(grouped) == len(set(grouped)), "a suspect is in two groups"
        assert set(grouped) == self._keys, "suspects"
        assert all(group.suspects for group in groups), "an empty group"
        assert self._accusers.keys() == self._keys, "a suspect that nobody accused"

    def _forget(self, requests: set[RequestKey]) -> None:
        self._waiting.clear(requests)
        self._keys -= requests
        for request in requests:
            self._accusers.pop(request, None)
