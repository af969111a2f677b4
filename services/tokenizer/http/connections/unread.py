"""Ends connections whose clients do not read what they were answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class UnreadWatch:
    """Aborts a transport once its peer has taken nothing for too long."""

    def __init__(self, max_unread_s: float, is_written: Callable[[], bool]) -> None:
        """`is_written` tells whether more is being written, so that what is unsent says nothing."""
        self._max_unread_s = max_unread_s
        self._is_written = is_written
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        """Watch what is unsent until all of it has left."""
        self.stop()
        self._arm(transport, transport.get_write_buffer_size())

    def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, transport: asyncio.Transport, num_unsent: int) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._max_unread_s, self._check, transport, num_unsent)

    def _check(self, transport: asyncio.Transport, num_before: int) -> None:
        self._timer = None
        if self._is_written() and not transport.is_closing():
            return
        num_unsent = transport.get_write_buffer_size()
        if num_unsent >= num_before > 0:
            transport.abort()
        elif num_unsent > 0:
            self._arm(transport, num_unsent)
