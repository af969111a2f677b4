"""An endpoint picker reads a cell's load from its tokenizer: names, types, labels, and values that follow it.

Source: the model server protocol of the Gateway API Inference Extension, "Metrics Reporting".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from shared.network.rpc import make_channel, reason_of, status_from_rpc_error
from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.client import connect, token_request
from tests.support.clients.endpoint_picker import MemberLoad, scrape_member
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port

pytestmark = pytest.mark.process

NUM_BLOCKS, MAX_WAITING = 64, 2
IDLE = MemberLoad(num_queued=0, num_running=0, kv_usage=0.0, block_size=16, num_blocks=NUM_BLOCKS)
LONG = token_request([3, 1, 4, 1, 5], max_tokens=400, ignore_eos=True)


@dataclass
class Member:
    """A cell, and where its tokenizer serves metrics."""

    cell: Cell
    address: str

    async def wait_for(self, condition: Callable[[MemberLoad], object]) -> MemberLoad:
        """Scrape until the load meets a condition; fails after five minutes."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(load := await scrape_member(self.address)):
                pass
        return load


@pytest.fixture(scope="module")
def member(tiny_model: Path) -> Iterator[Member]:
    """One that computes one request at a time."""
    address = f"127.0.0.1:{free_port()}"
    flags = (
        f"--tokenizer.manage-listen={address}",
        f"--scheduler.max-waiting-requests={MAX_WAITING}",
        "--scheduler.max-num-seqs=1",
        f"--worker.kv-cache-num-blocks={NUM_BLOCKS}",
    )
    with start_cell(tiny_model, *flags) as cell:
        yield Member(cell, address)


async def test_a_full_queue_is_read_as_queued_requests(member: Member) -> None:
    await member.wait_for(lambda load: load == IDLE)
    async with connect(member.cell) as client, make_channel(member.cell.cell_address, internal=True) as channel:
        admin: Any = scheduler_pb2_grpc.SchedulerAdminServiceStub(channel)
        # Nothing is computed, so that the queue stays as it is.
        await admin.Drain(scheduler_pb2.DrainRequest(dp_rank=0))
        waiting = [asyncio.create_task(client.generate(LONG)) for _ in range(MAX_WAITING)]
        await client.wait_until(lambda state: state.num_waiting == MAX_WAITING)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.generate(LONG)
        assert reason_of(status_from_rpc_error(refused.value)) == "QUEUE_FULL"
        full = MemberLoad(MAX_WAITING, 0, 0.0, IDLE.block_size, NUM_BLOCKS)
        await member.wait_for(lambda load: load == full)
        await admin.Undrain(scheduler_pb2.UndrainRequest(dp_rank=0))
        await asyncio.gather(*waiting)
    await member.wait_for(lambda load: load == IDLE)


async def test_a_running_request_is_read_with_the_blocks_that_it_holds(member: Member) -> None:
    async with connect(member.cell) as client:

        async def keep_busy() -> None:
            while True:
                await client.generate(LONG)

        busy = asyncio.create_task(keep_busy())
        load = await member.wait_for(lambda load: load.num_running)
        assert (load.num_running, load.num_queued) == (1, 0)
        # 405 tokens at most, in blocks of 16.
        assert 1 / NUM_BLOCKS <= load.kv_usage <= 26 / NUM_BLOCKS
        busy.cancel()
    await member.wait_for(lambda load: load == IDLE)
