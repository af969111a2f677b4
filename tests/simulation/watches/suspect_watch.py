"""Which requests an engine must suspect of killing workers, and which it must end, derived independently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from services.scheduler.core.batch.sequence import RequestKey

# A request is poison after it was alone in this many crashed steps, with none of its decode steps returned.
_MAX_CRASHES_ALONE = 2


class SuspectWatch:
    """Follows the suspects of one engine.

    A suspect is tried with at most half of the requests it was accused with, rounded up, and with no others:

        crash with {a b c d} -+-> trial {a b}: crash ---+-> trial {a}: crash, again {a}: crash -> a is poison
                              |                         +-> trial {b}: decodes -> b is cleared
                              +-> trial {c d}: decodes -> c and d are cleared
    """

    def __init__(self) -> None:
        # The most requests that one crash has accused.
        self.max_accused = 0
        # The most requests that may be tried together, by suspect, itself included.
        self._max_together: dict[RequestKey, int] = {}
        self._num_crashes_alone: Counter[RequestKey] = Counter()
        # The number of a request's last accusation: some requests of a trial may be cleared before others.
        self._accusation: dict[RequestKey, int] = {}
        self._num_accusations = 0
        # The domains whose crashes accused a suspect.
        self._accusers: dict[RequestKey, set[int]] = {}
        # By domain of an epoch: the number of accusations when its last step returned.
        self._last_shown: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._max_together)

    def __contains__(self, request: RequestKey) -> bool:
        return request in self._max_together

    def all(self) -> set[RequestKey]:
        """All suspects."""
        return set(self._max_together)

    def note_attach(self, domain: int) -> None:
        """A domain has new workers."""
        self._last_shown.pop(domain, None)

    def note_return(self, domain: int) -> None:
        """A domain has returned a step, which shows that its workers can compute."""
        self._last_shown[domain] = self._num_accusations

    def acquit(self, domain: int) -> None:
        """A domain has failed its control: clear what no other one has accused."""
        for request in [request for request, accusers in self._accusers.items() if accusers == {domain}]:
            self.clear(request)

    def accuse(self, requests: Collection[RequestKey], domain: int) -> RequestKey | None:
        """Accuse the requests in the steps of a lost domain; returns the one that is poison, if any."""
        self._num_accusations += 1
        self.max_accused = max(self.max_accused, len(requests))
        for request in requests:
            self._accusation[request] = self._num_accusations
            self._max_together[request] = (len(requests) + 1) // 2
            self._accusers.setdefault(request, set()).add(domain)
        if len(requests) != 1:
            return None
        (alone,) = requests
        self._num_crashes_alone[alone] += 1
        return alone if self._num_crashes_alone[alone] == _MAX_CRASHES_ALONE else None

    def clear(self, request: RequestKey) -> None:
        """Clear a request: one of its decode steps has returned, or it has ended."""
        self._max_together.pop(request, None)
        self._num_crashes_alone.pop(request, None)
        self._accusers.pop(request, None)

    def keep(self, requests: Collection[RequestKey]) -> None:
        """Clear all suspects but these requests, the only ones that have not ended."""
        for request in [request for request in self._max_together if request not in requests]:
            self.clear(request)

    def check_together(self, domain: int, requests: set[RequestKey], num_in_flight: int) -> None:
        """Check that these requests may share the steps in flight of a domain, which has shown that it can compute."""
        tried = [request for request in requests if request in self._max_together]
        if tried:
            # Another domain may have crashed since the trial began.
            accused_last = max(self._accusation[request] for request in tried)
            assert self._last_shown.get(domain, 0) >= accused_last, "a suspect is tried without a control"
            accusations = {self._accusation.get(request) for request in requests}
            assert len(accusations) == 1, "a suspect is tried together with other requests"
            assert num_in_flight == 1, "a suspect is tried with steps sent ahead"
            assert len(tried) <= max(self._max_together[request] for request in tried), "suspects are not halved"
