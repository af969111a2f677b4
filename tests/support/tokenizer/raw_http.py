"""A client that sends bytes as they are, and sees the answers that HTTP libraries would not show."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_RECEIVED_BYTES = 64 * 1024


class RawAnswer:
    """All that the server sent on a connection."""

    def __init__(self, data: bytes) -> None:
        self.text = data.decode("latin-1")
        self.statuses = [int(status) for status in _STATUS.findall(data)]

    @property
    def status(self) -> int:
        """The status of its only answer."""
        [status] = self.statuses
        return status

    @property
    def body(self) -> str:
        """What follows the first answer's head."""
        return self.text.partition("\r\n\r\n")[2]

    @property
    def error(self) -> Any:
        """The error in its only answer, which must be in OpenAI's form."""
        assert "content-type: application/json" in self.text.lower(), self.text
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class RawClient:
    """One connection. The server may close it at any moment."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes | str) -> bool:
        """Send all of it, text as latin-1; False if the server has closed the connection."""
        try:
            await self._loop.sock_sendall(self._socket, data.encode("latin-1") if isinstance(data, str) else data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    async def read_until(self, end: bytes) -> bytes:
        """Read up to `end`; fails if the connection ends first."""
        data = b""
        while not data.endswith(end):
            received = await self._loop.sock_recv(self._socket, 1)
            assert received, f"closed after {data!r}"
            data += received
        return data

    async def read_to_end(self) -> RawAnswer:
        """Read until the server closes the connection."""
        data = b""
        try:
            while received := await self._loop.sock_recv(self._socket, _RECEIVED_BYTES):
                data += received
        except ConnectionResetError:
            # It closed the connection with bytes unread.
            pass
        return RawAnswer(data)


@asynccontextmanager
async def connect(address: str, *, receive_buffer: int | None = None) -> AsyncIterator[RawClient]:
    """A connection to unix:PATH or HOST:PORT."""
    is_unix = address.startswith("unix:")
    with socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET) as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setblocking(False)
        host, _, port = address.rpartition(":")
        place: Any = address.removeprefix("unix:") if is_unix else (host, int(port))
        await asyncio.get_running_loop().sock_connect(connection, place)
        yield RawClient(connection)


async def exchange(address: str, data: bytes | str | Iterable[bytes | str]) -> RawAnswer:
    """Send bytes, or pieces of them until the server closes, on a connection of their own; returns what comes back."""
    async with connect(address) as client:
        for piece in [data] if isinstance(data, bytes | str) else data:
            if not await client.send(piece):
                break
        return await client.read_to_end()
