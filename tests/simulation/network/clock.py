"""Virtual time: the clock jumps to the next planned event."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable


class Clock:
    """A heap of planned events; events at the same time run in the order in which they were planned.

    Periodic events without an end, such as heartbeats, are background: they run only as long as other events are
    planned or `has_work` returns True.
    """

    def __init__(self, has_work: Callable[[], bool]) -> None:
        """Begin at 0; `has_work` tells whether background events must still run when nothing else is planned."""
        self._has_work = has_work
        self.now = 0.0
        self.num_events = 0
        self._num_background = 0
        self._heap: list[tuple[float, int, Callable[[], None], bool]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Callable[[], None], *, is_background: bool = False) -> None:
        """Plan an action; one planned for the past runs next."""
        self._num_background += is_background
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), action, is_background))

    def after(self, delay_s: float, action: Callable[[], None], *, is_background: bool = False) -> None:
        """Plan an action `delay_s` seconds from now."""
        self.at(self.now + delay_s, action, is_background=is_background)

    async def sleep_until(self, when: float) -> None:
        """Wait for a moment, in a task of a simulated process."""
        reached = asyncio.get_running_loop().create_future()

        def reach() -> None:
            if not reached.done():
                reached.set_result(None)

        self.at(when, reach)
        await reached

    def run_next(self) -> bool:
        """Run the next event; returns False if only background events without work are left."""
        if not self._heap or (len(self._heap) == self._num_background and not self._has_work()):
            return False
        self.now, _, action, is_background = heapq.heappop(self._heap)
        self._num_background -= is_background
        self.num_events += 1
        action()
        return True
