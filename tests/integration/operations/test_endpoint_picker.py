"""An endpoint picker reads a cell's load from its tokenizer: names, types, labels, and values that follow it.

Source: the model server protocol of the Gateway API Inference Extension, "Metrics Reporting".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import aiohttp
import grpc
import pytest

from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.cells.cell import held_work
from tests.support.cells.narrow_cell import MAX_WAITING, NUM_BLOCKS, NarrowCell
from tests.support.clients.client import connect, token_request
from tests.support.clients.endpoint_picker import MemberLoad, scrape_member
from tests.support.system.patience import PATIENCE_S

pytestmark = pytest.mark.process

IDLE = MemberLoad(num_queued=0, num_running=0, kv_usage=0.0, block_size=16, num_blocks=NUM_BLOCKS)
LONG_OVER_HTTP = {"prompt": [3, 1, 4, 1, 5], "max_tokens": 300, "ignore_eos": True}
LONG = token_request([3, 1, 4, 1, 5], max_tokens=300, ignore_eos=True)


async def wait_for_load(cell: NarrowCell, condition: Callable[[MemberLoad], object]) -> MemberLoad:
    """Scrape until the load meets a condition; fails after five minutes."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition(load := await scrape_member(cell.tokenizer_metrics)):
            pass
    return load


async def test_a_full_queue_is_read_as_queued_requests(narrow_cell: NarrowCell) -> None:
    await wait_for_load(narrow_cell, lambda load: load == IDLE)
    async with connect(narrow_cell.cell) as client:
        async with held_work(narrow_cell.cell.cell_address):
            waiting = [asyncio.create_task(client.generate(LONG)) for _ in range(MAX_WAITING)]
            await client.wait_until(lambda state: state.num_waiting == MAX_WAITING)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.generate(LONG)
            assert reason_of(status_from_rpc_error(refused.value)) == "QUEUE_FULL"
            full = MemberLoad(MAX_WAITING, 0, 0.0, IDLE.block_size, NUM_BLOCKS)
            await wait_for_load(narrow_cell, lambda load: load == full)
        await asyncio.gather(*waiting)
    await wait_for_load(narrow_cell, lambda load: load == IDLE)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_running_request_is_read_with_the_blocks_that_it_holds(narrow_cell: NarrowCell, protocol: str) -> None:
    async with connect(narrow_cell.cell) as client, aiohttp.ClientSession(f"http://{narrow_cell.http_address}") as http:

        async def keep_busy() -> None:
            while True:
                if protocol == "grpc":
                    await client.generate(LONG)
                else:
                    async with http.post("/v1/completions", json=LONG_OVER_HTTP) as response:
                        assert response.status == HTTPStatus.OK

        busy = asyncio.create_task(keep_busy())
        load = await wait_for_load(narrow_cell, lambda load: load.num_running)
        assert (load.num_running, load.num_queued) == (1, 0)
        # 305 tokens at most, in blocks of 16.
        assert 1 / NUM_BLOCKS <= load.kv_usage <= 20 / NUM_BLOCKS
        busy.cancel()
    await wait_for_load(narrow_cell, lambda load: load == IDLE)
