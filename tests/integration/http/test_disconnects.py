"""Clients that leave, or read nothing, at every phase of a request: no block stays held, and no neighbour notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.clients.client import Client, connect
from tests.support.clients.http_answers import (
    COMPLETION,
    HttpAnswer,
    RefusedError,
    collect,
    open_stream,
    post_streamed,
    read_events,
)
from tests.support.models.tool_caller import write_tool_caller

# Chunks of prompts are small, so that a long one takes many steps.
CHUNK_TOKENS = 16
MAX_UNREAD_S = 1.0
LONG_PROMPT = [3 + number % 400 for number in range(2000)]
ENDLESS = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0}
NEIGHBOUR = {
    "prompt": [9, 40, 7],
    "max_tokens": 400,
    "ignore_eos": True,
    "seed": 5,
    "temperature": 1.0,
    "return_token_ids": True,
    "determinism": "exact",
}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """A cell that runs two requests at once, with a long context; the socket holds little of what is not read."""
    directory = tmp_path_factory.mktemp("cell")
    flags = (
        REFERENCE,
        f"--http-listen=unix:{directory}/http.sock",
        f"--tokenizer.max-unread-s={MAX_UNREAD_S}",
        "--scheduler.max-num-seqs=2",
        f"--scheduler.max-num-batched-tokens={CHUNK_TOKENS}",
    )
    with start_cell(write_tool_caller(directory / "model", num_layers=1, context_length=4096), *flags) as cell:
        yield cell


class Visitor:
    """A client with one connection, which it can leave at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, body: dict[str, Any], *, num_missing: int = 0) -> None:
        """Send a request, without the last bytes of its body."""
        data = json.dumps(body).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        await self.send_raw(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[: len(data) - num_missing])

    async def send_raw(self, data: bytes) -> None:
        """Send bytes."""
        self._writer.write(data)
        await self._writer.drain()

    async def read_until(self, text: bytes) -> bytes:
        """Read what comes up to and with a text."""
        return await self._reader.readuntil(text)

    async def read_rest(self) -> bytes:
        """Read to the end of the connection."""
        return await self._reader.read()

    def leave(self) -> None:
        """Close the connection without a word."""
        self._writer.transport.abort()


@asynccontextmanager
async def visit(cell: Cell) -> AsyncIterator[Visitor]:
    """Open a connection."""
    reader, writer = await asyncio.open_unix_connection(cell.http_address.removeprefix("unix:"))
    visitor = Visitor(reader, writer)
    try:
        yield visitor
    finally:
        visitor.leave()


async def leave_in_the_head(visitor: Visitor, _client: Client) -> None:
    await visitor.send_raw(f"POST {COMPLETION} HTTP/1.1\r\nHost: loc".encode())


async def leave_in_the_body(visitor: Visitor, _client: Client) -> None:
    await visitor.send({"prompt": LONG_PROMPT, **ENDLESS}, num_missing=10)


async def leave_a_whole_answer_in_prefill(visitor: Visitor, client: Client) -> None:
    await visitor.send({"prompt": LONG_PROMPT, **ENDLESS})
    await client.wait_until(lambda state: state.num_running == 2)


async def leave_a_stream_in_prefill(visitor: Visitor, client: Client) -> None:
    await visitor.send({"prompt": LONG_PROMPT, "stream": True, **ENDLESS})
    await client.wait_until(lambda state: state.num_running == 2)


async def leave_a_whole_answer_in_decode(visitor: Visitor, client: Client) -> None:
    await visitor.send({"prompt": [5], **ENDLESS})
    # A block has 16 tokens: the third one is for tokens that were generated.
    before = (await client.wait_until(lambda state: state.num_running == 2)).num_used_blocks
    await client.wait_until(lambda state: state.num_used_blocks > before + 2)


async def leave_a_stream_in_decode(visitor: Visitor, _client: Client) -> None:
    await visitor.send({"prompt": [5], "stream": True, **ENDLESS})
    await visitor.read_until(b"data: ")


async def leave_a_stream_after_the_last_token(visitor: Visitor, _client: Client) -> None:
    await visitor.send({"prompt": [5], "max_tokens": 3, "ignore_eos": True, "stream": True})
    await visitor.read_until(b'"finish_reason":"length"')


PHASES: dict[str, Callable[[Visitor, Client], Awaitable[None]]] = {
    function.__name__.removeprefix("leave_"): function
    for function in (
        leave_in_the_head,
        leave_in_the_body,
        leave_a_whole_answer_in_prefill,
        leave_a_stream_in_prefill,
        leave_a_whole_answer_in_decode,
        leave_a_stream_in_decode,
        leave_a_stream_after_the_last_token,
    )
}


@pytest.fixture(scope="module")
def undisturbed(cell: Cell) -> HttpAnswer:
    """The neighbour's answer when nobody else is there."""

    async def ask() -> HttpAnswer:
        async with cell.http_session() as session:
            return await post_streamed(session, COMPLETION, NEIGHBOUR)

    return asyncio.run(ask())


@asynccontextmanager
async def beside_a_neighbour(cell: Cell, undisturbed: HttpAnswer) -> AsyncIterator[Client]:
    """Have a neighbour's stream run; at the end it must be as ever, and no block be held."""
    async with connect(cell) as client, cell.http_session() as session:
        await client.wait_until_idle()
        neighbour = asyncio.create_task(post_streamed(session, COMPLETION, NEIGHBOUR))
        await client.wait_until(lambda state: state.num_running == 1)
        yield client
        answer = await neighbour
        state = await client.wait_until_idle()
    assert answer.choices == undisturbed.choices
    assert state.num_free_blocks == state.num_blocks


@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_frees_its_blocks(cell: Cell, undisturbed: HttpAnswer, phase: str) -> None:
    async with beside_a_neighbour(cell, undisturbed) as client:
        async with visit(cell) as visitor:
            await PHASES[phase](visitor, client)
        # It runs for much longer than the neighbour, unless it is aborted.
        await client.wait_until(lambda state: state.num_running <= 1)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_the_queue_is_never_computed(cell: Cell, is_streamed: bool) -> None:
    async with connect(cell) as client:
        before = await client.wait_until_idle()
        async with visit(cell) as first, visit(cell) as second:
            for hog in (first, second):
                await hog.send({"prompt": [5], "stream": True, **ENDLESS})
                await hog.read_until(b"data: ")
            async with visit(cell) as waiting:
                await waiting.send({"prompt": LONG_PROMPT, "stream": is_streamed, **ENDLESS})
                await client.wait_until(lambda state: state.num_waiting)
            await client.wait_until(lambda state: not state.num_waiting)
            for hog in (first, second):
                await hog.read_until(b"data: ")
        after = await client.wait_until_idle()
    looked_up = after.num_prefix_queried_tokens - before.num_prefix_queried_tokens
    assert looked_up < len(LONG_PROMPT)


async def test_a_client_that_reads_nothing_loses_its_stream(cell: Cell, undisturbed: HttpAnswer) -> None:
    wordy = {"prompt": [5], "stream": True, "logprobs": 20, **ENDLESS}
    num_slow = cell.log().count("CLIENT_TOO_SLOW")
    async with beside_a_neighbour(cell, undisturbed) as client, visit(cell) as visitor:
        await visitor.send(wordy)
        await visitor.read_until(b"data: ")
        await client.wait_until(lambda _: cell.log().count("CLIENT_TOO_SLOW") > num_slow)
        await client.wait_until(lambda state: state.num_running <= 1)
        with pytest.raises(ConnectionError):
            await read_to_done(visitor)


async def read_to_done(visitor: Visitor) -> None:
    """Read to the end of a stream; raises ConnectionError where the connection ends before."""
    rest = await visitor.read_rest()
    if not rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        raise ConnectionError("the stream ended without [DONE]")


async def test_a_stream_that_is_aborted_ends_with_an_error(cell: Cell, undisturbed: HttpAnswer) -> None:
    async with (
        beside_a_neighbour(cell, undisturbed) as client,
        cell.http_session() as session,
        open_stream(session, COMPLETION, {"prompt": [5], **ENDLESS}) as response,
    ):
        answer_id = json.loads(await anext(read_events(response)))["id"]
        await client.abort(answer_id.removeprefix("cmpl-"))
        with pytest.raises(RefusedError) as failure:
            await collect(response, [])
    assert (failure.value.status, failure.value.code) == (200, "aborted_by_call")


async def test_a_stream_that_takes_too_long_ends_with_an_error(cell: Cell, undisturbed: HttpAnswer) -> None:
    async with beside_a_neighbour(cell, undisturbed), cell.http_session() as session:
        timeout_s, status = 0.05, 504
        # Until the time is enough for the first token, on any machine.
        while status == 504:
            timeout_s *= 2
            async with open_stream(session, COMPLETION, {"prompt": [5], "timeout_s": timeout_s, **ENDLESS}) as response:
                pieces: list[dict[str, Any]] = []
                with pytest.raises(RefusedError) as failure:
                    await collect(response, pieces)
            assert failure.value.code == "deadline_passed"
            status = failure.value.status
    assert status == 200
    assert pieces
