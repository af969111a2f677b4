"""Signs of life on a link: how often they are given, and when none has come for too long."""

from __future__ import annotations

import math

# An idle cell does nothing else, and each sign costs gRPC's threads ten looks for more work.
HEARTBEAT_S = 0.75
# A sign that comes so much of a period late takes the place of the next one.
_LATE_SHARE = 0.75
# How long workers keep a silent scheduler's claim: it may be dead behind a link that does not say so. One that was
# silent for longer must assume that another one has them, so both sides go by this. DESIGN section 7, "The epoch".
LEASE_S = 10.0


def next_beat_at(now: float, period_s: float = HEARTBEAT_S) -> float:
    """When the sign of life after one at `now` is due, in seconds of the monotonic clock.

    Every process of a machine gives its signs at the same multiples of the period, so that an idle cell wakes once for
    all of them. Signs are a period apart on average, never less than a quarter of it, never more than five quarters.
    """
    return (math.floor(now / period_s + 1 - _LATE_SHARE) + 1) * period_s


class Silence:
    """For how long a partner has said nothing, counted in signs of our own.

    Were it by the clock, a process that was held up itself would take its own pause for its partner's silence.
    """

    def __init__(self, limit_s: float) -> None:
        """Begin at a moment when the partner lives; it may then be silent for `limit_s` seconds."""
        self._max_beats = limit_s / HEARTBEAT_S
        self._num_beats = 0

    def hear(self) -> None:
        """Note that something came."""
        self._num_beats = 0

    def beat(self) -> bool:
        """Note a sign of our own, given when `next_beat_at` says; returns whether the silence is too long by now."""
        is_over = self._num_beats >= self._max_beats
        self._num_beats += 1
        return is_over
