"""A heap of things whose keys change."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

Thing = TypeVar("Thing")

# The heap is built again once it has this many entries more than twice as many as there are things.
MIN_STALE = 64


class LazyHeap(Generic[Thing]):
    """The numbers of things by their keys. That a key has risen, or a thing is gone, is noticed when it is looked at.

    Invariant: each thing that was added has an entry with its key or less, and when one is added there are few more
    entries than twice as many as things.
    """

    def __init__(self, things: Mapping[int, Thing], key: Callable[[Thing], float]) -> None:
        """`things` are the caller's, by number; those taken out of them are forgotten."""
        self._things = things
        self._key = key
        self._entries: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """How many entries there are, with those that are stale."""
        return len(self._entries)

    def add(self, number: int) -> None:
        """Add a thing, or note that its key has fallen."""
        heapq.heappush(self._entries, (self._key(self._things[number]), number))
        if len(self._entries) > 2 * len(self._things) + MIN_STALE:
            self._entries = [(self._key(each), number) for number, each in self._things.items()]
            heapq.heapify(self._entries)

    def lowest(self) -> int | None:
        """The number of the thing with the lowest key; None if there is none.

        Amortised O(log things) for each that was added or whose key rose.
        """
        while self._entries:
            key, number = self._entries[0]
            thing = self._things.get(number)
            if thing is None:
                heapq.heappop(self._entries)
            elif (risen := self._key(thing)) > key:
                heapq.heapreplace(self._entries, (risen, number))
            else:
                return number
        return None

    def clear(self) -> None:
        """Forget all things."""
        self._entries.clear()

    def check_integrity(self) -> None:
        """Assert that each thing has an entry with its key or less."""
        lowest: dict[int, float] = {}
        for key, number in self._entries:
            lowest[number] = min(key, lowest.get(number, key))
        for number, thing in self._things.items():
            assert lowest[number] <= self._key(thing), "a key"
