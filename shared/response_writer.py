"""Writes the responses of a call whose client may stop reading."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from shared.errors import ClientTooSlowError


class ResponseWriter:
    """The call fails if its client reads nothing for too long.

    HTTP/2's flow-control windows (64 KiB at the client, plus what its library reads ahead) absorb small responses, so a
    write first blocks long after the client stopped reading. Only this call waits: its producer merges what
    accumulates.
    """

    def __init__(self, context: grpc.aio.ServicerContext, max_unread_s: float) -> None:
        """Each write may take at most `max_unread_s`."""
        self._context = context
        self._max_unread_s = max_unread_s

    async def write(self, response: Any) -> None:
        """Write a response; returns once it has left this process.

        Raises:
            ClientTooSlowError: the client read nothing for too long. It receives this after the unread responses.
        """
        try:
            async with asyncio.timeout(self._max_unread_s):
                await self._context.write(response)
        except TimeoutError as error:
            raise ClientTooSlowError("the client did not read its response for too long") from error
