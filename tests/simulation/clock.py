"""Virtual time: what happens next happens now."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable


class Clock:
    """A heap of things that will happen; those of one moment happen in the order in which they were planned.

    What goes on for as long as there is a cell, heartbeats for instance, is planned as background: it happens as long
    as there is anything else to come, or somebody has work to do.
    """

    def __init__(self, has_work: Callable[[], bool]) -> None:
        """Begin at 0; `has_work` tells whether anybody waits for more than background to happen."""
        self._has_work = has_work
        self.now = 0.0
        self.num_events = 0
        self._num_background = 0
        self._heap: list[tuple[float, int, Callable[[], None], bool]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Callable[[], None], *, is_background: bool = False) -> None:
        """Plan an action; one that is planned for the past happens next."""
        self._num_background += is_background
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), action, is_background))

    def after(self, delay_s: float, action: Callable[[], None], *, is_background: bool = False) -> None:
        """Plan an action `delay_s` seconds from now."""
        self.at(self.now + delay_s, action, is_background=is_background)

    async def sleep_until(self, when: float) -> None:
        """Wait, in a task of a simulated process, for what comes about outside of it."""
        reached = asyncio.get_running_loop().create_future()

        def reach() -> None:
            if not reached.done():
                reached.set_result(None)

        self.at(when, reach)
        await reached

    def run_next(self) -> bool:
        """Let the next thing happen; returns whether there was one, besides background that nobody waits for."""
        if not self._heap or (len(self._heap) == self._num_background and not self._has_work()):
            return False
        self.now, _, action, is_background = heapq.heappop(self._heap)
        self._num_background -= is_background
        self.num_events += 1
        action()
        return True
