"""Accepts TLS connections, and bounds how many shake hands: an asyncio server knows a connection only afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 128
"""Handshakes at once; a further one ends the oldest, so that clients which send nothing do not keep others out."""

# Accepting fails while the process or the system has no file left.
_RETRY_S = 0.1
_CLOSE_S = 0.5


class TlsListener:
    """Listens until it is closed.

    Attributes:
        sockets: The listening sockets.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        handshake_s: float,
    ) -> None:
        """Begin to accept, on the running event loop.

        Args:
            sockets: They listen and do not block.
            make: Makes a connection's protocol.
            context: For the handshakes.
            handshake_s: How long one may take.
        """
        self.sockets = sockets
        self._make = make
        self._context = context
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        # In the order of their beginning.
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._accepting = [self._loop.create_task(self._accept(each)) for each in sockets]

    def close(self) -> None:
        """Accept no more, and end the handshakes; connections stay."""
        for task in (*self._accepting, *self._handshakes):
            task.cancel()
        for each in self.sockets:
            each.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listener)
            except OSError as error:
                logger.warning("cannot accept a connection", extra={"error": str(error)})
                await asyncio.sleep(_RETRY_S)
                continue
            if len(self._handshakes) >= MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._shake_hands(connection))
            self._handshakes[task] = None
            task.add_done_callback(lambda ended: self._handshakes.pop(ended, None))

    async def _shake_hands(self, connection: socket.socket) -> None:
        # The client has left, is too slow, or speaks no TLS; it has nothing to be told.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                self._make,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=_CLOSE_S,
            )
