"""The deadlines of requests."""

from __future__ import annotations

import heapq

Key = tuple[int, int]


class Deadlines:
    """Deadlines by client and handle.

    Invariant: `_deadlines` is authoritative; the heap has an entry for each, and at most about as many stale ones.
    """

    def __init__(self) -> None:
        self._deadlines: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []

    def __len__(self) -> int:
        return len(self._deadlines)

    @property
    def first(self) -> float | None:
        """The earliest deadline, if any."""
        while self._heap and self._is_stale(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, key: Key, deadline: float) -> None:
        """Set the deadline of a request that has none yet."""
        self._deadlines[key] = deadline
        heapq.heappush(self._heap, (deadline, key))

    def discard(self, key: Key) -> None:
        """Remove a request's deadline, if any."""
        if self._deadlines.pop(key, None) is not None and len(self._heap) > 2 * len(self._deadlines) + 64:
            self._heap = [(deadline, key) for key, deadline in self._deadlines.items()]
            heapq.heapify(self._heap)

    def pop_passed(self, now: float) -> list[Key]:
        """Remove and return the requests past their deadlines, the earliest first."""
        passed = []
        while (first := self.first) is not None and first <= now:
            _, key = heapq.heappop(self._heap)
            del self._deadlines[key]
            passed.append(key)
        return passed

    def _is_stale(self, entry: tuple[float, Key]) -> bool:
        deadline, key = entry
        return self._deadlines.get(key) != deadline
