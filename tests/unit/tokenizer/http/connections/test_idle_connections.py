"""Connections that send nothing, or read nothing, keep no others out."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.tokenizer.http.connections.limits import HttpLimits
from services.tokenizer.http.connections.unread import UnreadWatch
from tests.support.tokenizer.http_client import MESSAGES, run_http_service
from tests.support.tokenizer.raw_http import connect, exchange
from tests.unit.tokenizer.http.connections.test_hostile_heads import CHAT, HOST, LAST_PING, PING


@pytest.mark.parametrize("begun", ["", "GET / HT", f"{PING}\r\n"], ids=["silent", "in a head", "kept alive"])
async def test_the_longest_idle_connection_makes_room_for_a_new_one(
    model_dir: Path, tmp_path: Path, begun: str
) -> None:
    limits = HttpLimits(max_connections=3, head_s=3600.0)
    async with run_http_service(model_dir, tmp_path, http_limits=limits) as http, AsyncExitStack() as stack:
        busy, [sent] = await http.begin(CHAT, {"messages": MESSAGES, "stream": True})
        idle = [await stack.enter_async_context(connect(http.service.http_address)) for _ in range(2)]
        for client in idle:
            await client.send(begun)
            if begun.startswith(PING):
                await client.read_until(b"\r\n\r\n")
        assert (await exchange(http.service.http_address, LAST_PING)).status == 200
        # The first one was closed without an answer; the second one is still served.
        assert (await idle[0].read_to_end()).statuses == []
        await idle[1].send(LAST_PING if begun != "GET / HT" else f"TP/1.1\r\n{HOST}Connection: close\r\n\r\n")
        assert (await idle[1].read_to_end()).statuses in ([200], [404])
        http.send(sent, [70])
        assert (await busy).pieces


async def test_busy_connections_make_no_room(model_dir: Path, tmp_path: Path) -> None:
    async with run_http_service(model_dir, tmp_path, http_limits=HttpLimits(max_connections=2)) as http:
        tasks = [await http.begin(CHAT, {"messages": MESSAGES}) for _ in range(2)]
        answer = await exchange(http.service.http_address, LAST_PING)
        assert (answer.status, answer.error["code"]) == (429, "server_overloaded")
        for task, [sent] in tasks:
            http.send(sent, [70])
            assert (await task).status == 200


async def test_a_thousand_idle_connections_keep_nobody_out(model_dir: Path, tmp_path: Path) -> None:
    limits = HttpLimits(max_connections=50)
    async with run_http_service(model_dir, tmp_path, http_limits=limits) as http, AsyncExitStack() as stack:
        for _ in range(1000):
            await stack.enter_async_context(connect(http.service.http_address))
        assert (await exchange(http.service.http_address, LAST_PING)).status == 200


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_a_whole_answer_that_is_not_read_ends_its_connection(
    model_dir: Path, tmp_path: Path, connection: str
) -> None:
    limits = HttpLimits(max_connections=1, max_unread_s=0.2)
    async with (
        run_http_service(model_dir, tmp_path, http_limits=limits) as http,
        connect(http.service.http_address) as client,
    ):
        # More answers than the system's buffers hold, or as many as fit a queue.
        await client.send(f"GET /openapi.json HTTP/1.1\r\n{HOST}\r\n" * 31)
        await client.send(f"GET /openapi.json HTTP/1.1\r\n{HOST}Connection: {connection}\r\n\r\n")
        # It takes the only place until it is closed.
        while (await exchange(http.service.http_address, LAST_PING)).statuses != [200]:
            pass


class SlowlyReadTransport(asyncio.Transport):
    """A transport whose peer takes something between two looks, until it takes nothing more."""

    def __init__(self, unsent: list[int]) -> None:
        super().__init__()
        self.unsent = unsent
        self.aborted = asyncio.Event()

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.unsent.pop(0)

    def abort(self) -> None:
        self.aborted.set()


async def test_an_answer_is_not_cut_off_while_something_of_it_is_read() -> None:
    transport = SlowlyReadTransport([500, 499, 100, 7, 7, 1000])
    UnreadWatch(0.001, lambda: False).start(transport)
    await transport.aborted.wait()
    assert transport.unsent == [1000]


async def test_an_unread_connection_that_sends_a_bad_head_is_closed_at_once(model_dir: Path, tmp_path: Path) -> None:
    # Nothing but the end of the connection frees its place.
    limits = HttpLimits(max_connections=1, max_unread_s=3600.0)
    async with (
        run_http_service(model_dir, tmp_path, http_limits=limits) as http,
        connect(http.service.http_address) as client,
    ):
        request = f"GET /openapi.json HTTP/1.1\r\n{HOST}\r\n"
        await client.send(request * 30)
        await client.read_until(b"HTTP/1.1 200 ")
        while await client.send("X: y\r\n" * 1000):
            pass
        while (await exchange(http.service.http_address, LAST_PING)).statuses != [200]:
            pass
