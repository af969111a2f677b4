"""The streams of KV events, over real gRPC and with a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.core.cache.block_hashes import hash_blocks, hash_salt
from services.scheduler.server.kv_events import MAX_SUBSCRIBERS, KvEvents, Response
from shared.errors import ClientTooSlowError
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.clients.kv_index import KvIndex, held_blocks
from tests.support.clients.kv_subscriber import KvSubscriber
from tests.support.clients.narrow_channel import open_narrow_channel
from tests.support.clients.token_client import generate_tokens, seeded
from tests.support.scheduler.engine_driver import EngineDriver, token_bytes
from tests.support.scheduler.scheduler_shell import Cell, running_cell
from tests.support.scheduler.worker_peer import WorkerPeer
from tests.support.system.patience import PATIENCE_S

PROMPT = [5] * 40


def operator(cell: Cell) -> Any:
    """A stub of SchedulerService on the cell's port."""
    return scheduler_pb2_grpc.SchedulerServiceStub(cell.cell_channel)


def chain(prompt: list[int], salt: str = "", block_size: int = 16) -> list[int]:
    """The hashes of a prompt's full blocks."""
    num_tokens = len(prompt) // block_size * block_size
    return hash_blocks(hash_salt(salt.encode()), token_bytes(prompt[:num_tokens]), 4 * block_size)


async def serve(cell: Cell, prompt: list[int], salt: str = "") -> None:
    """Generate one token, so that the rank holds the prompt's blocks."""
    request = seeded(prompt, max_tokens=1)
    request.cache_salt = salt
    await generate_tokens(cell.scheduler, request)


async def reason_after(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    """The code and the reason with which a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), reason_of(status_from_rpc_error(error.value)) or ""


async def test_a_gateway_sees_prompts_appear_and_everything_go(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        gateway = KvSubscriber(operator(cell))
        await gateway.read_snapshots()
        await cell.wait_until_ready()
        await serve(cell, PROMPT)
        await serve(cell, PROMPT, "tenant")
        both = {*chain(PROMPT), *chain(PROMPT, "tenant")}
        await gateway.read_until_held(both)
        assert (len(both), gateway.block_size) == (4, 16)
        await cell.admin.FlushPrefixCache(scheduler_pb2.FlushPrefixCacheRequest())
        await gateway.read_until_held(set())
        assert gateway.indexes[0].num_cleared == 2
        await serve(cell, PROMPT)
        await gateway.read_until_held(set(chain(PROMPT)))


async def test_a_late_gateway_gets_a_snapshot_in_slices_and_then_changes(tmp_path: Path) -> None:
    async with running_cell(tmp_path, WorkerPeer(num_blocks=4096), kv_cache_block_size=1) as cell:
        await cell.wait_until_ready()
        first = KvSubscriber(operator(cell))
        prompts = [[10 + number] * 400 for number in range(6)]
        for prompt in prompts:
            await serve(cell, prompt)
        known = {block_hash for prompt in prompts for block_hash in chain(prompt, block_size=1)}
        late = KvSubscriber(operator(cell))
        for gateway in (first, late):
            await gateway.read_snapshots()
            await gateway.read_until_held(known)
            assert gateway.num_responses > 1
        await serve(cell, PROMPT)
        for gateway in (first, late):
            await gateway.read_until_held(known | {*chain(PROMPT, block_size=1)})
        assert first.indexes[0].blocks == late.indexes[0].blocks == held_blocks(cache_of(cell), 1)


async def test_a_lost_rank_clears_its_own_blocks_only(tmp_path: Path) -> None:
    workers = WorkerPeer(), WorkerPeer()
    async with running_cell(tmp_path, *workers) as cell:
        await cell.wait_until(lambda state: all(rank.is_attached for rank in state.rank_steps))
        gateway = KvSubscriber(operator(cell))
        for rank, token_id in enumerate((10, 11)):
            await cell.admin.Drain(scheduler_pb2.DrainRequest(dp_rank=1 - rank))
            await serve(cell, [token_id] * 40)
            await cell.admin.Undrain(scheduler_pb2.UndrainRequest(dp_rank=1 - rank))
        held = [{*chain([10] * 40)}, {*chain([11] * 40)}]
        await gateway.read_until(lambda: [gateway.hashes(0), gateway.hashes(1)] == held)
        num_cleared = gateway.indexes[0].num_cleared
        await cell.admin.Drain(scheduler_pb2.DrainRequest(dp_rank=1))
        workers[0].lose_link_at = len(workers[0].requests) + 1
        await serve(cell, [12] * 40)
        await gateway.read_until(lambda: gateway.indexes[0].num_cleared > num_cleared)
        await gateway.read_until_held({*chain([12] * 40)})
        assert gateway.hashes(1) == held[1]


async def test_caches_are_watched_only_while_someone_subscribes(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        await cell.wait_until_ready()
        assert cache_of(cell)._feed is None
        gateways = [KvSubscriber(operator(cell)) for _ in range(2)]
        for gateway in gateways:
            await gateway.read_snapshots()
        gateways[0].call.cancel()
        await serve(cell, PROMPT)
        await gateways[1].read_until_held({*chain(PROMPT)})
        gateways[1].call.cancel()
        await cell.wait_until(lambda _: cache_of(cell)._feed is None)
        await serve(cell, [6] * 40)
        again = KvSubscriber(operator(cell))
        await again.read_snapshots()
        assert again.hashes() == {*chain(PROMPT), *chain([6] * 40)}


async def test_a_gateway_that_reads_nothing_loses_its_stream_and_no_one_else_notices(tmp_path: Path) -> None:
    worker = WorkerPeer(num_blocks=4096)
    async with (
        running_cell(tmp_path, worker, kv_cache_block_size=1) as cell,
        open_narrow_channel(f"unix:{tmp_path}/cell") as channel,
    ):
        cell.server.kv_events._max_queued_blocks = 2000
        await cell.wait_until_ready()
        slow, quick = KvSubscriber(scheduler_pb2_grpc.SchedulerServiceStub(channel)), KvSubscriber(operator(cell))
        for gateway in (slow, quick):
            await gateway.read_snapshots()
        number = 0
        async with asyncio.timeout(PATIENCE_S):
            while len(cell.server.kv_events._subscribers) == 2:
                number += 1
                prompt = [number, *[9] * 400]
                last = chain(prompt, block_size=1)[-1]
                await serve(cell, prompt)
                while last not in quick.hashes():
                    await quick.read()
        expected = (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_TOO_SLOW")
        assert await reason_after(slow.read_until(lambda: False)) == expected
        await serve(cell, PROMPT)
        await quick.read_until(lambda: quick.indexes[0].blocks == held_blocks(cache_of(cell), 1))


async def test_there_are_not_too_many_subscribers_and_all_hear_of_the_end(tmp_path: Path) -> None:
    async with running_cell(tmp_path) as cell:
        gateways = [KvSubscriber(operator(cell)) for _ in range(MAX_SUBSCRIBERS)]
        for gateway in gateways:
            await gateway.read_snapshots()
        refused = KvSubscriber(operator(cell))
        assert await reason_after(refused.read()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        cell.server.close()
        for gateway in [*gateways, KvSubscriber(operator(cell))]:
            assert await reason_after(gateway.read_until(lambda: False)) == (
                grpc.StatusCode.UNAVAILABLE,
                "SCHEDULER_LOST",
            )


async def test_a_full_queue_ends_only_its_own_stream() -> None:
    driver = EngineDriver(num_blocks=512, block_size=1)
    events = KvEvents(driver.engine, max_queued_blocks=300)
    quick_index = KvIndex()
    has_heard, never = asyncio.Event(), asyncio.Event()

    async def write_never(_: Response) -> None:
        await never.wait()

    async def write(response: Response) -> None:
        quick_index.store_columns(
            response.stored_hashes, response.run_lengths, response.run_parent_hashes, response.run_starts
        )
        has_heard.set()

    slow, quick = asyncio.create_task(events.stream(write_never)), asyncio.create_task(events.stream(write))
    handle = 0
    async with asyncio.timeout(PATIENCE_S):
        while not slow.done():
            handle += 1
            driver.submit(handle, [handle, *[9] * 100], max_tokens=1)
            driver.run()
            events.wake()
            while chain([handle], block_size=1)[0] not in quick_index.blocks:
                await has_heard.wait()
                has_heard.clear()
    with pytest.raises(ClientTooSlowError):
        await slow
    assert not quick.done()
    quick.cancel()


def cache_of(cell: Cell) -> Any:
    """The prefix cache of rank 0."""
    return cell.server.engine._cell.ranks[0].scheduler._blocks._prefixes
