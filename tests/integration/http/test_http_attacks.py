"""The HTTP port of a real tokenizer service under attack: it goes on serving, and its memory does not grow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bench.parts.worker_memory import private_bytes
from tests.support.cells.cell import Cell, start_cell
from tests.support.system.ports import free_port
from tests.support.tokenizer.malformed_json import SECRET, huge_chats, malformed_chats, shows_secret
from tests.support.tokenizer.raw_http import RawAnswer, RawClient, connect, exchange

HOST = "Host: localhost\r\n"
POST = f"POST /v1/chat/completions HTTP/1.1\r\n{HOST}Content-Type: application/json\r\n"
BAD_HEADS = (
    f"GET /{SECRET}\r\n\r\n",
    f"GET / HTTP/1.1\r\n{HOST}X: {'x' * 9000}\r\n\r\n",
    f"GET / HTTP/1.1\r\n{HOST}{'X: y' + chr(13) + chr(10)}" + "X: y\r\n" * 200,
    f"{POST}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{SECRET}",
    f"{POST}Transfer-Encoding: chunked\r\n\r\n{SECRET}\r\n",
    f"{POST}Transfer-Encoding: chunked\r\n\r\n1;{'x' * 300_000}",
)
NUM_IDLE = 3000
MAX_CONNECTIONS = 1000
AT_A_TIME = 16
ROUNDS = 4
# Of the interpreter's and the allocator's own making; a leak of a kilobyte per request would exceed it.
MARGIN_BYTES = 16 << 20
# Two bodies of 4 MiB that are all small lists, each parsed to 100 MiB and more, and those that wait.
PEAK_BYTES = 700 << 20


@dataclass(frozen=True)
class Attacked:
    """A cell with an HTTP port."""

    cell: Cell
    address: str

    def memory(self) -> int:
        """The private memory of its tokenizer service, in bytes."""
        return private_bytes(self.cell.role_to_process["tokenizer"].pid)


@pytest.fixture(scope="module")
def attacked(tiny_model: Path) -> Iterator[Attacked]:
    """A cell of the tiny model, for this module."""
    address = f"127.0.0.1:{free_port()}"
    flags = (f"--http-listen={address}", f"--tokenizer.max-http-connections={MAX_CONNECTIONS}")
    with start_cell(tiny_model, *flags) as cell:
        yield Attacked(cell, address)


async def ask(attacked: Attacked, body: bytes) -> RawAnswer:
    """A chat on a connection of its own."""
    head = f"{POST}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return await exchange(attacked.address, [head, body])


async def check_served(attacked: Attacked) -> None:
    """The cell answers."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert (await ask(attacked, json.dumps(body).encode())).status == 200


@asynccontextmanager
async def stream(attacked: Attacked) -> AsyncIterator[RawClient]:
    """A stream in flight, which must end well."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True, "stream": True}
    data = json.dumps(body)
    async with connect(attacked.address) as client:
        await client.send(f"{POST}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n{data}")
        await client.read_until(b"data: ")
        yield client
        answer = await client.read_to_end()
        assert "data: [DONE]" in answer.text


async def send_all(attacked: Attacked, bodies: list[bytes]) -> None:
    """Send malformed chats, several at a time; each is refused."""
    semaphore = asyncio.Semaphore(AT_A_TIME)

    async def send(body: bytes) -> None:
        async with semaphore:
            answer = await ask(attacked, body)
        assert 400 <= answer.status < 500
        assert not shows_secret(answer.error)

    await asyncio.gather(*map(send, bodies))


async def open_idle(attacked: Attacked) -> None:
    """Open more connections than there may be; some begin a head, some do not read a whole answer."""
    async with AsyncExitStack() as stack:
        for number in range(NUM_IDLE):
            client = await stack.enter_async_context(connect(attacked.address))
            await client.send(("", "GET / HT", f"GET /openapi.json HTTP/1.1\r\n{HOST}\r\n")[number % 3])
        await check_served(attacked)


async def send_bad_heads(attacked: Attacked) -> None:
    """Send heads that cannot be read, and endless ones."""
    for head in BAD_HEADS * 40:
        answer = await exchange(attacked.address, head)
        # Where more is on its way when it is refused, the answer may be lost.
        assert all(400 <= status < 500 for status in answer.statuses)
    async with connect(attacked.address) as client:
        await client.send(f"GET / HTTP/1.1\r\n{HOST}")
        while await client.send("X: y\r\n" * 1000):
            pass


@pytest.mark.slow
async def test_memory_is_flat_under_attack(attacked: Attacked) -> None:
    bodies = [*malformed_chats().values()] * 2
    memory = []
    for _ in range(ROUNDS):
        async with stream(attacked):
            await send_all(attacked, bodies)
            await send_bad_heads(attacked)
            await open_idle(attacked)
        await check_served(attacked)
        memory.append(attacked.memory())
    # The first round fills caches.
    assert memory[-1] <= memory[1] + MARGIN_BYTES, [size >> 20 for size in memory]
    assert SECRET not in attacked.cell.log()
    assert "unexpected error" not in attacked.cell.log()


@pytest.mark.slow
async def test_huge_bodies_take_bounded_memory(attacked: Attacked) -> None:
    before = attacked.memory()
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, attacked.memory())
            await asyncio.sleep(0.02)

    watcher = asyncio.create_task(watch())
    async with stream(attacked):
        await send_all(attacked, [make_body() for make_body in huge_chats().values()] * 2)
    watcher.cancel()
    await check_served(attacked)
    assert peak - before <= PEAK_BYTES, f"{(peak - before) >> 20} MiB"
    assert SECRET not in attacked.cell.log()
