"""Delays between attempts that fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


@dataclass(slots=True)
class Backoff:
    """Each delay is up to twice the last one, and between half and all of what it may be.

    Randomised, so that many clients of a server that comes back do not return together.
    """

    draw: Callable[[], float]
    """Uniform from 0 to 1."""
    _limit_s: float = FIRST_DELAY_S

    def next_delay_s(self) -> float:
        """The delay after another failure."""
        limit_s, self._limit_s = self._limit_s, min(2 * self._limit_s, MAX_DELAY_S)
        return limit_s * (0.5 + 0.5 * self.draw())

    def reset(self) -> None:
        """An attempt succeeded."""
        self._limit_s = FIRST_DELAY_S
