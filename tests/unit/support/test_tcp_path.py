"""The path that the chaos tests cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.system.tcp_path import TcpPath


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1024):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def _path_to_echo() -> AsyncIterator[tuple[TcpPath, asyncio.StreamReader, asyncio.StreamWriter]]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with server, TcpPath(server.sockets[0].getsockname()[1]) as path:
        reader, writer = await asyncio.open_connection("127.0.0.1", path.port)
        yield path, reader, writer
        writer.close()


@pytest.mark.parametrize("direction", [{"to_client": False}, {"to_server": False}, {}], ids=["up", "down", "both"])
async def test_data_sent_during_a_cut_arrives_when_the_path_is_healed(direction: dict[str, bool]) -> None:
    async with _path_to_echo() as (path, reader, writer):
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        path.cut(**direction)
        writer.write(b"during")
        answer = asyncio.ensure_future(reader.readexactly(6))
        # Long enough for an echo on this machine.
        done, _ = await asyncio.wait([answer], timeout=0.05)
        assert not done
        path.heal()
        assert await answer == b"during"


async def test_an_end_that_closes_during_a_cut_is_noticed_afterwards() -> None:
    async with _path_to_echo() as (path, reader, writer):
        path.cut()
        writer.write_eof()
        end = asyncio.ensure_future(reader.read())
        done, _ = await asyncio.wait([end], timeout=0.05)
        assert not done
        path.heal()
        assert await end == b""
