"""When the engine's heartbeats are due, and when its claim to the workers has expired."""

from __future__ import annotations

from shared.heartbeat import HEARTBEAT_S, LEASE_S, next_beat_at

# An engine whose beat is late by more than this was stopped, and received nothing in the meantime.
_PAUSE_S = 1.0


class Heartbeat:
    """The engine's own heartbeat.

    Invariant: `next_at` is when the next beat is due; the first one is due at once.
    """

    def __init__(self) -> None:
        self.next_at = float("-inf")
        self._last_at: float | None = None

    def is_lease_over(self, now: float) -> bool:
        """Whether the last beat is so long ago that this engine's claim to its workers may have expired."""
        return self._last_at is not None and now - self._last_at > LEASE_S

    def beat(self, now: float) -> float:
        """Record a beat; returns for how many seconds the engine was stopped before it, 0 if it was not."""
        pause_s = 0.0 if self._last_at is None else now - self._last_at - HEARTBEAT_S
        self._last_at = now
        self.next_at = next_beat_at(now)
        return pause_s if pause_s > _PAUSE_S else 0.0
