from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from shared.errors import ClientTooSlowError
from shared.network.response_writer import ResponseWriter


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


async def write_all(call: Call, *responses: str, max_unread_s: float = 60.0) -> None:
    with ResponseWriter(call, max_unread_s) as writer:
        for response in responses:
            await writer.write(response)


async def test_responses_are_written_while_the_client_reads() -> None:
    call = Call(reads=True)
    await write_all(call, "a", "b")
    assert call.written == ["a", "b"]


async def test_a_client_that_reads_slowly_has_time() -> None:
    call = Call(reads=False)
    write = asyncio.create_task(write_all(call, "a"))
    await call.begun.wait()
    call.reads.set()
    await write
    assert call.written == ["a"]


async def test_a_client_that_does_not_read_in_time_is_dropped() -> None:
    call = Call(reads=False)
    with pytest.raises(ClientTooSlowError):
        await write_all(call, "a", max_unread_s=0.01)
    call.reads.set()
    await asyncio.sleep(0)
    # The write was cancelled, too.
    assert call.written == []


async def test_a_call_with_nothing_to_write_is_left_alone_and_then_watched() -> None:
    call, max_unread_s = Call(reads=False), 0.01
    with ResponseWriter(call, max_unread_s) as writer:
        # The timer has passed several times without a write.
        await asyncio.sleep(5 * max_unread_s)
        with pytest.raises(ClientTooSlowError):
            await writer.write("a")


async def test_a_write_that_begins_late_has_all_of_its_time() -> None:
    loop = asyncio.get_running_loop()
    call, max_unread_s = Call(reads=False), 0.05
    with ResponseWriter(call, max_unread_s) as writer:
        # The first look comes during the write.
        await asyncio.sleep(0.7 * max_unread_s)
        began_at = loop.time()
        with pytest.raises(ClientTooSlowError):
            await writer.write("a")
        # Not as a difference, which is rounded.
        assert loop.time() >= began_at + max_unread_s


async def test_a_call_cancelled_during_a_blocked_write_ends_as_cancelled() -> None:
    call = Call(reads=False)
    write = asyncio.create_task(write_all(call, "a"))
    await call.begun.wait()
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write


async def test_a_client_too_slow_for_one_write_leaves_its_task_uncancelled() -> None:
    with pytest.raises(ClientTooSlowError):
        await write_all(Call(reads=False), "a", max_unread_s=0.01)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_nothing_keeps_a_call_that_has_ended() -> None:
    call = Call(reads=True)
    await write_all(call, "a")
    left = weakref.ref(call)
    del call
    gc.collect()
    assert left() is None
