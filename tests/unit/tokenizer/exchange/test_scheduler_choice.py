"""Whatever schedulers say and whenever their streams end, at most one is used, and it is left only for a reason."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.exchange.cell_requests import CellRequests
from services.tokenizer.exchange.scheduler_client import SchedulerClient
from services.tokenizer.exchange.scheduler_stream import StreamEnd

NUM_SCHEDULERS = 3
DIGEST = "model"

# A scheduler, and what it says: that it holds workers, or that it does not; None if its stream ends.
Event = tuple[int, bool | None]


class Schedulers:
    """Schedulers that say what a test wants, and a client that chooses between them."""

    def __init__(self) -> None:
        self.requests = CellRequests(60.0)
        self.client = SchedulerClient([], DIGEST, self.requests, self._on_change, silence_s=1.0)
        self.streams = [self.client.open() for _ in range(NUM_SCHEDULERS)]
        self.holds = [False] * NUM_SCHEDULERS
        self.is_computed = False

    @property
    def used(self) -> int | None:
        """The scheduler to which requests are submitted."""
        used = [number for number, stream in enumerate(self.streams) if stream is self.requests.stream]
        return used[0] if used else None

    async def play(self, event: Event) -> None:
        """Let a scheduler say something, or its stream end; then every stream that is over is opened again."""
        number, holds = event
        if holds is None:
            await self._end(number, StreamEnd("broken", is_unexplained=True))
        else:
            await self._say(number, holds=holds)
        for number, stream in enumerate(self.streams):
            if stream.left.done():
                await self._end(number, stream.left.result())

    async def _say(self, number: int, *, holds: bool) -> None:
        stream = self.streams[number]
        if holds and stream.cell_info is None:
            stream.note_cell_info(exchange_pb2.CellInfo(scheduler_instance_id=str(number), model_digest=DIGEST))
            await self.client.on_heard(stream)
        stream.note_heartbeat(exchange_pb2.SchedulerHeartbeat(holds_workers=holds))
        self.holds[number] = holds
        await self.client.on_heard(stream)

    async def _end(self, number: int, end: StreamEnd) -> None:
        ended, self.streams[number] = self.streams[number], self.client.open()
        self.holds[number] = False
        await self.client.on_end(ended, end)

    async def _on_change(self) -> None:
        is_computed = self.client.why_not_computed is None
        assert not is_computed or self.client.load is not None, "a linked cell's load is known"
        self.is_computed = is_computed


async def play(events: list[Event]) -> None:
    schedulers = Schedulers()
    for event in events:
        before, held_before, stream_before = schedulers.used, list(schedulers.holds), list(schedulers.streams)
        await schedulers.play(event)
        used, holds = schedulers.used, schedulers.holds
        assert schedulers.client.is_linked is (used is not None)
        is_computed = used is not None and holds[used]
        assert schedulers.is_computed is is_computed, "the change of what is computed was told"
        # A holder is used if there is one.
        assert not any(holds) or (used is not None and holds[used])
        if event[1] is not None and held_before[event[0]] is event[1]:
            assert used == before, "repeated words move requests"
        if before is not None and used != before:
            is_ended = event == (before, None)
            has_lost = (not event[1] and event[0] == before) or not held_before[before]
            assert is_ended or has_lost, "a scheduler that holds workers is left"
            assert schedulers.streams[before] is not stream_before[before], "the stream that is left stays open"


@given(st.lists(st.tuples(st.integers(0, NUM_SCHEDULERS - 1), st.sampled_from([True, False, None])), max_size=40))
def test_one_that_holds_workers_is_used_and_not_left_while_it_does(events: list[Event]) -> None:
    asyncio.run(play(events))
