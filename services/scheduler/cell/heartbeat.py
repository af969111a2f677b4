"""The engine's own heartbeat."""

from __future__ import annotations

from shared.network.heartbeat import HEARTBEAT_S, LEASE_S, OwnPause, next_beat_at

# An engine whose beat is late by more than this was stopped, and received nothing in the meantime.
_PAUSE_S = 1.0


class Heartbeat:
    """When heartbeats are due, and whether the claim to the workers has expired.

    Invariant: `next_at` is when the next beat is due; the first one is due at once.
    """

    def __init__(self) -> None:
        self.next_at = float("-inf")
        self._own_pause = OwnPause(HEARTBEAT_S, _PAUSE_S)

    def is_lease_over(self, now: float) -> bool:
        """Whether the claim to the workers may have expired since the last beat."""
        last_at = self._own_pause.last_at
        return last_at is not None and now - last_at > LEASE_S

    def beat(self, now: float) -> float:
        """Record a beat; returns how many seconds the engine was stopped before it."""
        self.next_at = next_beat_at(now)
        return self._own_pause.note(now)
