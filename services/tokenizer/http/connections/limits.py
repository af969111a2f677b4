"""How many connections there may be, how large heads, and how long everything may take."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LINE_BYTES = 8190
MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a whole head, and of what else surrounds a body: the sizes of its chunks, their extensions, its trailers."""
MAX_HEADERS = 100
MAX_BODY_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What an operator sets, and durations that tests shorten."""

    max_connections: int = 4096
    head_s: float = 10.0
    """Seconds from the first byte of a head, or the connection's begin, to its end. TLS handshakes may take as long."""
    body_s: float = 30.0
    max_unread_s: float = 30.0
    """A connection ends once its client has taken nothing of an answer for so long."""
    lingering_s: float = 2.0
    """How long what still comes is read and dropped, so that the client sees the answer that refused it."""
