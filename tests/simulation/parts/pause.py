"""A simulated process that was stopped (SIGSTOP)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tests.simulation.network.clock import Clock


class Pause:
    """Holds back the actions of a stopped process, and runs them in order when it is continued."""

    def __init__(self, clock: Clock) -> None:
        # When the process is continued, or was; 0 after its end.
        self.until = clock.now
        self._clock = clock
        self._waiting: deque[Callable[[], object]] = deque()

    @property
    def is_on(self) -> bool:
        """Whether the process is stopped now."""
        return self.until > self._clock.now

    def extend(self, duration_s: float) -> None:
        """Stop the process for this long from now, unless it is already stopped for longer."""
        self.until = max(self.until, self._clock.now + duration_s)

    def end(self) -> None:
        """Discard the waiting actions: the process has ended."""
        self.until = 0.0
        self._waiting.clear()

    def when_over(self, action: Callable[[], object]) -> None:
        """Run an action in the process: now, or when it is continued."""
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
