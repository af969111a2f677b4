from __future__ import annotations

import asyncio

import pytest

from shared.errors import ClientTooSlowError
from shared.response_writer import ResponseWriter


class Call:
    """A call whose client reads only when the test lets it."""

    def __init__(self, *, reads: bool) -> None:
        self.reads = asyncio.Event()
        self.begun = asyncio.Event()
        self.written: list[str] = []
        if reads:
            self.reads.set()

    async def write(self, response: str) -> None:
        self.begun.set()
        await self.reads.wait()
        self.written.append(response)


async def test_responses_are_written_while_the_client_reads() -> None:
    call = Call(reads=True)
    writer = ResponseWriter(call, 60.0)
    await writer.write("a")
    await writer.write("b")
    assert call.written == ["a", "b"]


async def test_a_client_that_reads_slowly_has_time() -> None:
    call = Call(reads=False)
    write = asyncio.create_task(ResponseWriter(call, 60.0).write("a"))
    await call.begun.wait()
    call.reads.set()
    await write
    assert call.written == ["a"]


async def test_a_client_that_does_not_read_in_time_is_dropped() -> None:
    call = Call(reads=False)
    with pytest.raises(ClientTooSlowError):
        await ResponseWriter(call, 0.01).write("a")
    call.reads.set()
    await asyncio.sleep(0)
    # The write was cancelled, too.
    assert call.written == []


async def test_a_call_cancelled_during_a_blocked_write_ends_as_cancelled() -> None:
    call = Call(reads=False)
    write = asyncio.create_task(ResponseWriter(call, 60.0).write("a"))
    await call.begun.wait()
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
