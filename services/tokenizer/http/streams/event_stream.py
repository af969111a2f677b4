"""Sends server-sent events, and waits with the status line for the first token or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import HttpVersion11, web

from shared.network.response_writer import ResponseWriter

FIRST_TOKEN_S = 1.0
"""The status line waits at most this long for the first token, from the submission on."""
COMMENT_S = 15.0
"""A sign of life follows this much silence, so that nothing between takes the connection for dead."""
COMMENT = b":\n\n"
"""The sign of life of most routes: clients leave comments out."""


class EventStream:
    """The body of one answer; until it has begun, an error can still have a status of its own.

    Everything must be written by the task that entered it.
    """

    def __init__(
        self, request: web.Request, response: web.StreamResponse, max_unread_s: float, sign_of_life: bytes = COMMENT
    ) -> None:
        self._request = request
        self._response = response
        self._sign_of_life = sign_of_life
        self._writer = ResponseWriter(response, max_unread_s)
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []
        self._opening = asyncio.Lock()
        self._is_open = False
        # Whether it is open, and a write is a chunk of the body (RFC 9112, section 7.1).
        self._is_chunked = False
        self._written_at = 0.0
        self._keeper: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._writer.__enter__()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.__exit__(error_type, error, traceback)
        if self._keeper is not None:
            self._keeper.cancel()

    @property
    def has_begun(self) -> bool:
        """Whether the status line is on its way."""
        return self._is_open or self._opening.locked()

    def note_submission(self) -> None:
        """The request has been submitted: the first token is awaited."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())

    def try_write(self, data: bytes) -> bool:
        """Send events, if that needs no waiting; else nothing has changed. `data` must not be empty.

        Every token passes here, and each layer of awaited calls to the transport would cost as much as all of this.
        """
        protocol = self._request.protocol
        transport = protocol.transport
        if not self._is_chunked or protocol.writing_paused or transport is None or transport.is_closing():
            return False
        self._written_at = self._loop.time()
        # The loop sends what the transport has got in one iteration by one system call.
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def write(self, data: bytes, *, begins: bool = True) -> None:
        """Send events; they are held back until the stream begins, with these if `begins`.

        Raises:
            ClientTooSlowError: the client has read nothing for too long.
        """
        if not self._is_open:
            self._held.append(data)
            if begins or self._opening.locked():
                await self._begin(self._writer.write)
        elif data:
            self._written_at = self._loop.time()
            await self._writer.write(data)

    async def _begin(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Send the status line and what was held back."""
        async with self._opening:
            if not self._is_open:
                await self._response.prepare(self._request)
                self._is_open = True
            held, self._held = b"".join(self._held), []
        self._written_at = self._loop.time()
        await write(held or self._sign_of_life)
        self._is_chunked = self._request.version >= HttpVersion11

    async def _keep(self) -> None:
        await asyncio.sleep(FIRST_TOKEN_S)
        try:
            if not self._is_open:
                await self._begin(self._response.write)
            while True:
                silence_s = self._loop.time() - self._written_at
                if silence_s < COMMENT_S:
                    await asyncio.sleep(COMMENT_S - silence_s)
                    continue
                self._written_at = self._loop.time()
                await self._response.write(self._sign_of_life)
        except ConnectionError:
            # The handler is cancelled when its client goes.
            pass
