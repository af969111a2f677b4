"""Finds the request that crashes its worker: suspects are tried by halves, until one is alone.

Bookkeeping only: which requests are suspects, and which are tried next. `quarantine` gives each trial its own ranks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# A request that was alone in this many crashed steps, without a decode step of it returning in between, is poison.
MAX_CRASHES_ALONE = 2


@dataclass(frozen=True, slots=True)
class Group:
    """Suspects that are tried together, by request id; they have been waiting since `since`."""

    request_ids: list[str]
    since: float


class Suspects:
    """Requests that were in a step that its worker did not survive, until one of their decode steps returns.

    A crash accuses the requests in its steps that had not returned. They are retried by halves, each half alone on a
    failure domain; a decode step that returns clears its requests. So n suspects are resolved after at most 3 + log2(n)
    crashes, including the first, and the request found was alone in two of them. Two unrelated crashes in a row can
    only condemn a request that was alone both times, without a decode step in between.

    The choices of a request are tried together: they share a prompt, and fail together.

    Invariant: a suspect is in exactly one group, which is either waiting or on trial on a domain.
    """

    def __init__(self) -> None:
        self._waiting: deque[Group] = deque()
        self._trials: dict[int, Group] = {}
        self._num_crashes_alone: dict[str, int] = {}
        self._ids: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    @property
    def next_group(self) -> Group | None:
        """The group that is tried next; None when no group is waiting."""
        return self._waiting[0] if self._waiting else None

    @property
    def trying_domains(self) -> list[int]:
        """The domains that have a trial."""
        return list(self._trials)

    def is_tried_on(self, request_id: str, domain: int) -> bool:
        """Whether a request is on trial on a domain."""
        trial = self._trials.get(domain)
        return trial is not None and request_id in trial.request_ids

    def accuse(self, domain: int, request_ids: list[str], now: float) -> str | None:
        """A domain was lost with these requests in its steps that had not returned; its trial, if any, is over.

        Each request is named once; if there are none, none is accused.

        Returns:
            The request found to be poison, which is no longer a suspect; None if none was found.
        """
        self.break_off(domain, now, but=frozenset(request_ids))
        if len(request_ids) == 1:
            return self._accuse_alone(request_ids[0], now)
        half = (len(request_ids) + 1) // 2
        for part in (request_ids[half:], request_ids[:half]):
            if part:
                self._waiting.appendleft(Group(part, now))
        self._ids.update(request_ids)
        return None

    def clear(self, domain: int, request_ids: set[str]) -> None:
        """Clear the requests of a domain's trial that were in a returned decode step, or that have ended."""
        trial = self._trials[domain]
        for request_id in request_ids.intersection(trial.request_ids):
            self._forget(request_id)
        left = [request_id for request_id in trial.request_ids if request_id not in request_ids]
        if left:
            self._trials[domain] = Group(left, trial.since)
        else:
            del self._trials[domain]

    def begin_trial(self, domain: int) -> list[str]:
        """Put the next group on trial on a domain that has no trial; returns its requests."""
        group = self._trials[domain] = self._waiting.popleft()
        return group.request_ids

    def break_off(self, domain: int, now: float, *, but: frozenset[str] = frozenset()) -> None:
        """End a domain's trial, if any, and queue its requests again, except those in `but`."""
        trial = self._trials.pop(domain, None)
        if trial is None:
            return
        left = [request_id for request_id in trial.request_ids if request_id not in but]
        if left:
            self._waiting.appendleft(Group(left, now))

    def drop_ended(self, ended: set[str]) -> None:
        """Forget requests that have ended."""
        self._waiting = deque(
            Group(left, group.since)
            for group in self._waiting
            if (left := [request_id for request_id in group.request_ids if request_id not in ended])
        )
        for domain in self.trying_domains:
            self.clear(domain, ended)
        for request_id in ended:
            self._forget(request_id)

    def ids(self) -> set[str]:
        """All suspects."""
        return set(self._ids)

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        groups = [*self._waiting, *self._trials.values()]
        standing = [request_id for group in groups for request_id in group.request_ids]
        assert len(standing) == len(set(standing)), "a suspect is in two groups"
        assert set(standing) == self._ids, "suspects"
        assert self._num_crashes_alone.keys() <= self._ids, "crashes of a request that is not a suspect"
        assert all(group.request_ids for group in groups), "an empty group"

    def _accuse_alone(self, request_id: str, now: float) -> str | None:
        num_crashes = self._num_crashes_alone.get(request_id, 0) + 1
        if num_crashes == MAX_CRASHES_ALONE:
            self._forget(request_id)
            return request_id
        self._num_crashes_alone[request_id] = num_crashes
        self._ids.add(request_id)
        self._waiting.appendleft(Group([request_id], now))
        return None

    def _forget(self, request_id: str) -> None:
        self._ids.discard(request_id)
        self._num_crashes_alone.pop(request_id, None)
