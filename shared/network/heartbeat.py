"""Heartbeats: when they are sent, and when a peer is lost or this process was paused."""

from __future__ import annotations

import math

# An idle cell does nothing else, and each heartbeat makes gRPC's threads poll ten times for more work.
HEARTBEAT_S = 0.75
# A heartbeat that is later than this share of a period replaces the next one.
_LATE_SHARE = 0.75
# How long workers keep a silent scheduler's claim: its host may be dead without the connection having been closed. A
# scheduler that was silent for longer must assume that another one has claimed its workers, so both use this value.
LEASE_S = 10.0


def next_beat_at(now: float, period_s: float = HEARTBEAT_S) -> float:
    """When the heartbeat after one at `now` is due, on the monotonic clock.

    All processes of a machine use the same multiples of the period, so that an idle cell wakes up once for all of them.
    Heartbeats are one period apart on average, and between 0.25 and 1.25:

        period  0         1         2         3
                |---------|---------|---------|--->
        sent    ^                 ^           ^
                0.0               1.8         3.0    the one due at 1.0 is late and replaces the one due at 2.0
    """
    return (math.floor(now / period_s + 1 - _LATE_SHARE) + 1) * period_s


class Silence:
    """How long a peer has been silent, in our own heartbeats.

    By the clock, a process would mistake its own pause for its peer's silence.
    """

    def __init__(self, limit_s: float) -> None:
        """The peer was heard now, and may be silent for `limit_s`."""
        self._max_beats = limit_s / HEARTBEAT_S
        self._num_beats = 0

    def note_alive(self) -> None:
        """The peer sent something."""
        self._num_beats = 0

    def beat(self) -> bool:
        """Note our own heartbeat, sent at `next_beat_at`; True if the peer was silent for too long."""
        is_over = self._num_beats >= self._max_beats
        self._num_beats += 1
        return is_over


class OwnPause:
    """Notices that this process was stopped or starved, which must not count as its peers' silence."""

    def __init__(self, period_s: float, limit_s: float) -> None:
        """Expect `note` every `period_s`; more than `limit_s` late is a pause."""
        self.last_at: float | None = None
        self._period_s = period_s
        self._limit_s = limit_s

    def note(self, now: float) -> float:
        """Note that the process runs; returns the seconds that it was paused, or 0."""
        pause_s = 0.0 if self.last_at is None else now - self.last_at - self._period_s
        self.last_at = now
        return pause_s if pause_s > self._limit_s else 0.0
