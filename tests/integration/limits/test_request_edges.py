"""Deadlines, slow readers, priorities and cache salts on a running cell, through both services (`door`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.clients.client import Client, connect, token_request
from tests.support.clients.narrow_channel import open_narrow_channel
from tests.support.clients.token_client import Request, generate_tokens, prompt_request, read_to_end

PROMPT = [*range(10, 50)]
DOORS = pytest.mark.parametrize("door", ["text", "tokens"])


@pytest.fixture(scope="module")
def cell(tiny_model: Path) -> Iterator[Cell]:
    """A cell that runs two requests at once, and soon drops clients that do not read."""
    flags = (
        REFERENCE,
        "--scheduler.max-num-seqs=2",
        "--scheduler.max-unread-s=0.3",
        "--tokenizer.max-unread-s=0.3",
    )
    with start_cell(tiny_model, *flags) as cell:
        yield cell


def request_at(door: str, prompt: list[int], **sampling: Any) -> Any:
    """The same request in the form of the tokenizer or the scheduler service."""
    return token_request(prompt, **sampling) if door == "text" else prompt_request(prompt, **sampling)


def generate_at(client: Client, door: str) -> Any:
    """The `Generate` method of a service."""
    return client.tokenizer.Generate if door == "text" else client.scheduler.Generate


async def error_of(call: Any) -> tuple[grpc.StatusCode, str | None]:
    """The status and reason with which a call must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await read_to_end(call, [])
    return error.value.code(), reason_of(status_from_rpc_error(error.value))


@asynccontextmanager
async def busy(client: Client, num_requests: int) -> AsyncIterator[None]:
    """Keep this many long requests in the cell; only two of them run at once."""
    hog = prompt_request([3], max_tokens=500, ignore_eos=True)
    calls = [client.scheduler.Generate(hog) for _ in range(num_requests)]
    for call in calls:
        await call.read()
    yield
    for call in calls:
        call.cancel()


@DOORS
async def test_a_deadline_that_passes_in_the_queue_ends_a_request_that_nothing_was_computed_for(
    cell: Cell, door: str
) -> None:
    async with connect(cell) as client:
        before = await client.wait_until_idle()
        async with busy(client, 16):
            call = generate_at(client, door)(request_at(door, PROMPT, max_tokens=4), timeout=0.3)
            code, _ = await error_of(call)
        after = await client.wait_until_idle()
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    # Only the one-token prompts of the long requests were looked up.
    assert after.num_prefix_queried_tokens - before.num_prefix_queried_tokens < len(PROMPT)
    assert after.num_free_blocks == after.num_blocks


@DOORS
async def test_a_deadline_that_passes_in_the_middle_of_an_answer_frees_its_blocks(cell: Cell, door: str) -> None:
    async with connect(cell) as client, busy(client, 1):
        call = generate_at(client, door)(request_at(door, PROMPT, max_tokens=450, ignore_eos=True), timeout=0.2)
        code, _ = await error_of(call)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    async with connect(cell) as client:
        after = await client.wait_until_idle()
    assert after.num_free_blocks == after.num_blocks


@DOORS
async def test_a_client_that_stops_reading_loses_its_answer_and_its_neighbour_does_not(cell: Cell, door: str) -> None:
    address = cell.address if door == "text" else cell.scheduler_address
    stub_type = tokenizer_pb2_grpc.TokenizerServiceStub if door == "text" else scheduler_pb2_grpc.SchedulerServiceStub
    neighbour_request = prompt_request(PROMPT, max_tokens=300, ignore_eos=True)
    async with connect(cell) as client, open_narrow_channel(address) as channel:
        undisturbed = await generate_tokens(client.scheduler, neighbour_request)
        unread = stub_type(channel).Generate(request_at(door, [3], max_tokens=500, ignore_eos=True))
        neighbour = await generate_tokens(client.scheduler, neighbour_request)
        assert neighbour.token_ids == undisturbed.token_ids
        await client.wait_until_idle()
        assert await error_of(unread) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_TOO_SLOW")


@DOORS
async def test_a_priority_is_taken_and_one_that_does_not_exist_is_refused(cell: Cell, door: str) -> None:
    async with connect(cell) as client:
        request = request_at(door, PROMPT, max_tokens=2)
        request.priority = common_pb2.PRIORITY_HIGH
        await read_to_end(generate_at(client, door)(request), [])
        request.priority = 17
        expected = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert await error_of(generate_at(client, door)(request)) == expected


async def num_cached_tokens(
    client: Client, door: str, salt: str = "", metadata: tuple[tuple[str, str], ...] = ()
) -> int:
    """The number of prompt tokens found in the cache."""
    request = request_at(door, PROMPT, max_tokens=2)
    request.cache_salt = salt
    responses: list[tokenizer_pb2.GenerateResponse] = []
    await read_to_end(generate_at(client, door)(request, metadata=metadata), responses)
    return responses[-1].finish.usage.num_cached_tokens


async def flush_prefix_cache(cell: Cell) -> int:
    """Flush the prefix cache; returns the number of cached blocks dropped."""
    async with make_channel(cell.cell_address, internal=True) as channel:
        admin = scheduler_pb2_grpc.SchedulerAdminServiceStub(channel)
        num_blocks: int = (await admin.FlushPrefixCache(scheduler_pb2.FlushPrefixCacheRequest())).num_blocks
        return num_blocks


async def test_both_doors_share_the_prefixes_of_equal_salts_whatever_metadata_says(cell: Cell) -> None:
    tenant = (("x-tenant", "a-tenant"), ("x-lockstep-tenant", "a-tenant"))
    async with connect(cell) as client:
        await flush_prefix_cache(cell)
        assert await num_cached_tokens(client, "text", "a") == 0
        assert await num_cached_tokens(client, "text", "a", metadata=tenant) == 32
        assert await num_cached_tokens(client, "tokens", "a", metadata=tenant) == 32
        assert await num_cached_tokens(client, "tokens", "b") == 0
        assert await num_cached_tokens(client, "tokens") == 0
        assert await num_cached_tokens(client, "text", metadata=tenant) == 32


async def test_a_flush_forgets_prefixes_and_harms_no_request(cell: Cell) -> None:
    request = prompt_request(PROMPT, max_tokens=200, ignore_eos=True)
    async with connect(cell) as client:
        undisturbed = await generate_tokens(client.scheduler, request)
        assert await num_cached_tokens(client, "tokens") == 32
        running = asyncio.create_task(generate_tokens(client.scheduler, request))
        await client.wait_until(lambda state: state.num_running)
        assert await flush_prefix_cache(cell) > 0
        assert (await running).token_ids == undisturbed.token_ids
        assert (await client.wait_until_idle()).num_cached_blocks == 0
        assert await num_cached_tokens(client, "tokens") == 0


async def test_an_output_so_far_is_refused_without_the_seed_that_it_was_drawn_with(cell: Cell) -> None:
    request = Request(prompt_token_ids=PROMPT, choices_so_far=[{"token_ids": [5]}], sampling={"max_tokens": 5})
    async with connect(cell) as client:
        expected = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert await error_of(client.scheduler.Generate(request)) == expected
