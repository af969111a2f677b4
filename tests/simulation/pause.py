"""A simulated process that was stopped (SIGSTOP)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tests.simulation.clock import Clock


class Pause:
    """When a process does nothing. What it was to do meanwhile it does when it is continued, in order.

    Attributes:
        until: When it is continued, or was; 0 after the end of a process.
    """

    def __init__(self, clock: Clock) -> None:
        self.until = clock.now
        self._clock = clock
        self._waiting: deque[Callable[[], object]] = deque()

    @property
    def is_on(self) -> bool:
        """Whether the process does nothing now."""
        return self.until > self._clock.now

    def extend(self, duration_s: float) -> None:
        """Let the process do nothing for so long from now, or for as long as it would anyway."""
        self.until = max(self.until, self._clock.now + duration_s)

    def end(self) -> None:
        """The process is gone: what waits is never done."""
        self.until = 0.0
        self._waiting.clear()

    def when_over(self, action: Callable[[], object]) -> None:
        """Do something in the process: now, or when it is continued."""
        if not self.is_on and not self._waiting:
            action()
            return
        self._waiting.append(action)
        if len(self._waiting) == 1:
            self._clock.at(self.until, self._continue)

    def _continue(self) -> None:
        while self._waiting and not self.is_on:
            self._waiting.popleft()()
        # It may have been stopped again meanwhile.
        if self._waiting:
            self._clock.at(self.until, self._continue)
