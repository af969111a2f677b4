"""Which requests an engine must suspect of killing workers, and which it must end, worked out from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

# DESIGN section 7, "a request kills its worker": alone in so many crashed steps, with no decode step of it returned.
_MAX_CRASHES_ALONE = 2


class SuspectWatch:
    """Follows the suspects of one engine, by the numbers of their requests.

    A suspect is tried with at most half of those that it was accused with, rounded up, and with nobody else.
    """

    def __init__(self) -> None:
        # The most requests that one crash has accused.
        self.max_accused = 0
        # The most that may be tried together with a suspect, itself included.
        self._max_together: dict[int, int] = {}
        self._num_crashes_alone: Counter[int] = Counter()
        # Which accusation was a request's last: some of a trial may be cleared before the others.
        self._accusation: dict[int, int] = {}
        self._num_accusations = 0

    def __bool__(self) -> bool:
        return bool(self._max_together)

    def __contains__(self, number: int) -> bool:
        return number in self._max_together

    def accuse(self, numbers: Collection[int]) -> int | None:
        """A domain was lost in steps that held these requests; returns the one that is poison, if one is."""
        self._num_accusations += 1
        self.max_accused = max(self.max_accused, len(numbers))
        for number in numbers:
            self._accusation[number] = self._num_accusations
            self._max_together[number] = (len(numbers) + 1) // 2
        if len(numbers) != 1:
            return None
        (alone,) = numbers
        self._num_crashes_alone[alone] += 1
        return alone if self._num_crashes_alone[alone] == _MAX_CRASHES_ALONE else None

    def clear(self, number: int) -> None:
        """A decode step of a request has returned, or it has ended."""
        self._max_together.pop(number, None)
        self._num_crashes_alone.pop(number, None)

    def keep(self, numbers: Collection[int]) -> None:
        """Only these requests have not ended."""
        for number in [number for number in self._max_together if number not in numbers]:
            self.clear(number)

    def check_together(self, numbers: set[int], num_in_flight: int) -> None:
        """Check who may share the steps in flight of a domain."""
        tried = [number for number in numbers if number in self._max_together]
        if tried:
            assert len({self._accusation.get(number) for number in numbers}) == 1, "a suspect is tried beside others"
            assert num_in_flight == 1, "a suspect is tried with steps sent ahead"
            assert len(tried) <= max(self._max_together[number] for number in tried), "suspects are not halved"
