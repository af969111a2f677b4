"""How fast the waiting queue empties."""

from __future__ import annotations

import math

# Time constant of the exponential decay.
WINDOW_S = 30.0
MIN_DELAY_S = 0.1
MAX_DELAY_S = 60.0


class DrainRate:
    """Tells a refused client when to retry.

    The departures per second are their exponentially decaying number, divided by the time constant, or by the time
    since the first departure while that is shorter.
    """

    def __init__(self) -> None:
        self._faded_departures = 0.0
        self._updated_at = 0.0
        self._first_at: float | None = None

    def note(self, num_departures: int, now: float) -> None:
        """Record departures at `now`, in monotonic seconds."""
        if self._first_at is None:
            self._first_at = now
        self._faded_departures = self._faded(now) + num_departures
        self._updated_at = now

    def delay_s(self, num_places: int, now: float) -> float:
        """Seconds until `num_places` places become free; the maximum while no departure has been seen."""
        if self._first_at is None:
            return MAX_DELAY_S
        measured_s = min(WINDOW_S, max(now - self._first_at, MIN_DELAY_S))
        rate = self._faded(now) / measured_s
        if rate * MAX_DELAY_S <= num_places:
            return MAX_DELAY_S
        return max(MIN_DELAY_S, num_places / rate)

    def _faded(self, now: float) -> float:
        return self._faded_departures * math.exp((self._updated_at - now) / WINDOW_S)
