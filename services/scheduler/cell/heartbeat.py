"""When the engine gives a sign of life, and when it has given none for so long that others may have its workers."""

from __future__ import annotations

from shared.heartbeat import HEARTBEAT_S, LEASE_S, next_beat_at

# An engine that nobody woke for so much longer than it asked for was stopped, and heard nobody meanwhile.
_PAUSE_S = 1.0


class Heartbeat:
    """The engine's own pulse.

    Invariant: `next_at` is when the next beat is due; at once before the first.
    """

    def __init__(self) -> None:
        self.next_at = float("-inf")
        self._last_at: float | None = None

    def is_lease_over(self, now: float) -> bool:
        """Whether the last beat is too long ago for anybody to wait for this engine."""
        return self._last_at is not None and now - self._last_at > LEASE_S

    def beat(self, now: float) -> float:
        """Note a beat; returns for how long the engine was stopped before it, 0 when it was not."""
        pause_s = 0.0 if self._last_at is None else now - self._last_at - HEARTBEAT_S
        self._last_at = now
        self.next_at = next_beat_at(now)
        return pause_s if pause_s > _PAUSE_S else 0.0
