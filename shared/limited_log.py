"""Log lines that clients can cause."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable

PERIOD_S = 60.0
"""A line of each kind comes at most once in this time."""


class LimitedLog:
    """Writes warnings at a limited rate, since a client may cause as many as it likes.

    Any thread may write; two that do so at once may both be let through.
    """

    def __init__(self, logger: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._now = now
        # When a line of each kind was last written, and how often it has happened since.
        self._kinds: dict[Hashable, tuple[float, int]] = {}

    def warning(self, message: str, *, kind: Hashable = "", **facts: object) -> None:
        """Write a line with these facts, and with how often it has happened since the last one.

        `kind` is one of a few: kinds are never forgotten.
        """
        written_at, num_unwritten = self._kinds.get((message, kind), (-math.inf, 0))
        now = self._now()
        if now - written_at < PERIOD_S:
            self._kinds[message, kind] = written_at, num_unwritten + 1
            return
        self._kinds[message, kind] = now, 0
        self._logger.warning(message, extra={**facts, "num_times": num_unwritten + 1})
