"""A gateway's end of `SubscribeKvEvents`: an index per rank, rebuilt from the responses alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import grpc

from lockstep.v1 import scheduler_pb2
from tests.support.clients.kv_index import KvIndex
from tests.support.system.patience import PATIENCE_S


class KvSubscriber:
    """Reads a stream, and checks what holds for every response.

    Attributes:
        indexes: What each rank holds.
        complete: The ranks whose snapshots are complete.
        num_responses: Those applied so far.
    """

    def __init__(self, scheduler: Any) -> None:
        """Subscribe through a stub of SchedulerService on the cell's port."""
        self.call = scheduler.SubscribeKvEvents(scheduler_pb2.SubscribeKvEventsRequest())
        self.indexes: defaultdict[int, KvIndex] = defaultdict(KvIndex)
        self.complete: set[int] = set()
        self.num_responses = 0
        self.block_size = 0
        self._sequence_numbers: dict[int, int] = {}

    def hashes(self, rank: int = 0) -> set[int]:
        """The hashes of the blocks that a rank holds."""
        return set(self.indexes[rank].blocks)

    async def read(self) -> None:
        """Read and apply one response; raises the error with which the call ends."""
        response = await self.call.read()
        assert response is not grpc.aio.EOF, "the server ended the stream without an error"
        self.apply(response)

    async def read_until(self, condition: Callable[[], object]) -> None:
        """Read responses until a condition is met; fails after five minutes."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await self.read()

    async def read_snapshots(self, num_ranks: int = 1) -> None:
        """Read until the snapshots of so many ranks are complete."""
        await self.read_until(lambda: len(self.complete) == num_ranks)

    async def read_until_held(self, hashes: set[int], rank: int = 0) -> None:
        """Read until a rank holds exactly these blocks."""
        await self.read_until(lambda: self.hashes(rank) == hashes)

    def apply(self, response: scheduler_pb2.SubscribeKvEventsResponse) -> None:
        """Apply one response."""
        rank, number = response.dp_rank, response.sequence_number
        before = self._sequence_numbers.get(rank, number)
        assert number in {before, before + 1}, "a response is missing"
        self._sequence_numbers[rank] = number
        assert response.block_size
        self.block_size = response.block_size
        self.num_responses += 1
        index = self.indexes[rank]
        if response.all_cleared:
            index.clear()
        index.remove(response.removed_hashes)
        index.states.difference_update(response.removed_state_hashes)
        index.store_columns(
            response.stored_hashes, response.run_lengths, response.run_parent_hashes, response.run_starts
        )
        index.states.update(response.stored_state_hashes)
        if response.snapshot_complete:
            assert rank not in self.complete, "a snapshot is complete twice"
            self.complete.add(rank)
