"""Delays between attempts that fail."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

_random = secrets.SystemRandom()


@dataclass(slots=True)
class Backoff:
    """Each delay may be twice as long as the one before, up to a limit.

    Part of it is random, so that many clients of a server that comes back do not return together.
    """

    first_s: float
    longest_s: float
    """The limit. The first delay obeys it too."""
    jitter: float = 0.5
    """The part of each delay that is random; from 0, for delays that are always the same, to 1."""
    draw: Callable[[], float] = _random.random
    """Uniform from 0 to 1."""
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def next_delay_s(self) -> float:
        """The delay after another failure."""
        delay_s, self._next_s = self._next_s, min(2 * self._next_s, self.longest_s)
        return delay_s * (1.0 - self.jitter * self.draw())

    def reset(self) -> None:
        """An attempt succeeded."""
        self._next_s = min(self.first_s, self.longest_s)
