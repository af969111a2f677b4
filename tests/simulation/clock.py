"""Virtual time: what happens next happens now."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """A heap of things that will happen; those of one moment happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Plan an action; one that is planned for the past happens next."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Plan an action `delay_s` seconds from now."""
        self.at(self.now + delay_s, action)

    def run_next(self) -> bool:
        """Let the next thing happen; returns whether there was one."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        self.num_events += 1
        action()
        return True
