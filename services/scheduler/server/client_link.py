"""The scheduler's end of a replica's stream."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable

from google.protobuf.message import Message

from lockstep.internal.v1 import exchange_pb2
from shared.errors import NotReadyError, ServiceError
from shared.network.heartbeat import Silence

logger = logging.getLogger(__name__)

# A replica that does not read for this long loses its stream: steps never wait for it.
MAX_UNREAD_S = 5.0
# How long messages queued when a link is closed may take to leave; after that they are dropped.
LAST_WORDS_S = 0.5


class ClientLink:
    """One replica's stream."""

    def __init__(self, number: int, on_close: Callable[[], None], silence_s: float = math.inf) -> None:
        """Make a link in the running event loop.

        Args:
            number: The engine's number for the replica.
            on_close: Called in a later turn of the event loop, whichever side closed the link.
            silence_s: A replica that stops sending heartbeats for this long loses its link.
        """
        self.number = number
        self.closed: asyncio.Future[ServiceError | None] = asyncio.get_running_loop().create_future()
        """The error that the stream ends with, or None for OK."""
        self.cell_info: exchange_pb2.CellInfo | None = None
        """The cell's facts as they were last sent."""
        self.has_timings = False
        """Whether the replica has the capability `TIMINGS`."""
        self._on_close = on_close
        self._silence = Silence(silence_s)
        self._sends_heartbeats = False
        self._outbox: asyncio.Queue[tuple[float, Message] | None] = asyncio.Queue()
        self._oldest_unread_at: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether only queued messages will still be sent."""
        return self.closed.done()

    def send(self, message: Message, now: float) -> None:
        """Queue a message; closes the link if its reader has taken none for too long."""
        if self.is_closed:
            return
        if self._oldest_unread_at is not None and now - self._oldest_unread_at > MAX_UNREAD_S:
            logger.warning("a replica is not reading its stream", extra={"client": self.number})
            self.close(NotReadyError("the replica was not reading its stream"))
            return
        if self._oldest_unread_at is None:
            self._oldest_unread_at = now
        self._outbox.put_nowait((now, message))

    def note_alive(self, *, is_heartbeat: bool) -> None:
        """Note a message from the replica; any is a sign of life, once one of them was a heartbeat."""
        self._silence.note_alive()
        self._sends_heartbeats |= is_heartbeat

    def beat(self, heartbeat: exchange_pb2.SchedulerHeartbeat, now: float) -> None:
        """Send a heartbeat that is due; closes the link if its replica has sent none for too long."""
        self.send(exchange_pb2.ExchangeResponse(heartbeat=heartbeat), now)
        if self._sends_heartbeats and self._silence.beat() and not self.is_closed:
            logger.warning("a replica is silent", extra={"client": self.number})
            self.close(NotReadyError("the replica was silent"))

    def close(self, error: ServiceError | None) -> None:
        """End the stream with an error, or with OK, after what is queued if the replica reads it."""
        if not self.is_closed:
            self.closed.set_result(error)
            self._outbox.put_nowait(None)
            # Called in a later turn: the engine's actions may be in the middle of being carried out.
            self.closed.get_loop().call_soon(self._on_close)

    async def messages(self) -> AsyncIterator[Message]:
        """The messages to send, until the link is closed."""
        while (entry := await self._outbox.get()) is not None:
            self._oldest_unread_at, message = entry
            yield message
            if self._outbox.empty():
                self._oldest_unread_at = None
