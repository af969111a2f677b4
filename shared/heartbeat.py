"""Signs of life on a link: how often they are given, and when none has come for too long."""

from __future__ import annotations

# DESIGN section 7, "Noticing".
HEARTBEAT_S = 0.5
# How long workers keep a silent scheduler's claim: it may be dead behind a link that does not say so. One that was
# silent for longer must assume that another one has them, so both sides go by this. DESIGN section 7, "The epoch".
LEASE_S = 10.0


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
        """Note a sign of our own, given every `HEARTBEAT_S`; returns whether the silence is too long by now."""
        is_over = self._num_beats >= self._max_beats
        self._num_beats += 1
        return is_over
