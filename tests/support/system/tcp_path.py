"""A TCP path that can be cut in one or both directions without either end noticing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType


class TcpPath:
    """Forwards connections to a server on this machine until it is cut.

    A cut behaves like a network that drops all packets: data sent meanwhile stays in the sender's kernel without an
    error, and arrives when the path is healed, as if retransmitted. A connection opened meanwhile is accepted and gets
    no answer; a close by one end reaches the other when the path is healed.

    Attributes:
        num_connections: Connections opened so far.
    """

    def __init__(self, target_port: int) -> None:
        """Prepare a path to 127.0.0.1:`target_port`; entering the context opens its own port."""
        self.num_connections = 0
        self._target_port = target_port
        self._connected = asyncio.Condition()
        self._to_server = asyncio.Event()
        self._to_client = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.heal()

    async def __aenter__(self) -> TcpPath:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    @property
    def port(self) -> int:
        """The port to which clients connect instead of the server's own."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self, *, to_server: bool = True, to_client: bool = True) -> None:
        """Block these directions."""
        if to_server:
            self._to_server.clear()
        if to_client:
            self._to_client.clear()

    def heal(self) -> None:
        """Unblock both directions; data sent meanwhile is delivered first."""
        self._to_server.set()
        self._to_client.set()

    async def wait_for_connections(self, count: int) -> None:
        """Wait until `count` connections have been opened."""
        async with self._connected:
            await self._connected.wait_for(lambda: self.num_connections >= count)

    def lose(self) -> None:
        """Drop all connections and the data sent into the cut, as if the sender had died."""
        for pump in self._pumps:
            pump.cancel()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except ConnectionError:
            writer.close()
            return
        self._start(_pump(reader, server_writer, self._to_server))
        self._start(_pump(server_reader, writer, self._to_client))
        async with self._connected:
            self.num_connections += 1
            self._connected.notify_all()

    def _start(self, pump: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(pump)
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_whole: asyncio.Event) -> None:
    try:
        while data := await reader.read(1 << 16):
            await is_whole.wait()
            writer.write(data)
            await writer.drain()
        await is_whole.wait()
    except ConnectionError:
        # The other end has closed, so close this one too.
        await is_whole.wait()
    finally:
        writer.close()
