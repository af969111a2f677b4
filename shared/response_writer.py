"""Writing the responses of a call whose client may have stopped reading."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from shared.errors import ClientTooSlowError


class ResponseWriter:
    """Writes to one call; a client that takes nothing for too long loses it.

    Small responses hide in HTTP/2's windows (64 KiB of them at the client, and what its library reads ahead), so a
    write blocks long after the client has stopped reading. Nobody waits for it but the call: whoever produces the
    responses lets what piles up meanwhile leave in one.
    """

    def __init__(self, context: grpc.aio.ServicerContext, max_unread_s: float) -> None:
        """Write to the call of `context`, no write for longer than `max_unread_s`."""
        self._context = context
        self._max_unread_s = max_unread_s

    async def write(self, response: Any) -> None:
        """Write a response; returns when it has left this process.

        Raises:
            ClientTooSlowError: the client has taken nothing for too long. It learns so behind what it has not read.
        """
        try:
            async with asyncio.timeout(self._max_unread_s):
                await self._context.write(response)
        except TimeoutError as error:
            raise ClientTooSlowError("the client took nothing of its answer for too long") from error
