"""Tenants of a real cell get their shares, however many streams one of them has.

Everything is counted in steps, and in tokens in the order of the steps. For a client of the tokenizer that reads late,
the tokens of many steps arrive at once, and nothing of its tenant waits meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.v1 import tokenizer_pb2_grpc
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.tenants.tenant import Tenant
from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.client import Client, connect, read_answer, token_request
from tests.support.clients.flood import open_channels
from tests.support.clients.flood_process import HTTP_KIND, LONG, run_flood
from tests.support.clients.key_files import key_line, write_keys
from tests.support.clients.tenant_replica import open_tenant_replica
from tests.support.system.ports import free_port

NUM_SLOTS = 8
KEY = "sk-loud"
LOUD, QUIET, WITNESS = Tenant("loud"), Tenant("quiet"), Tenant("witness")


@pytest.fixture(scope="module")
def small_cell(tiny_model: Path) -> Iterator[Cell]:
    """A cell with few slots and a long queue."""
    flags = (f"--scheduler.max-num-seqs={NUM_SLOTS}", "--scheduler.max-waiting-requests=10000")
    with start_cell(tiny_model, *flags) as cell:
        yield cell


async def count_steps_to_first_token(cell: Cell, num_streams: int) -> int:
    """The most steps that one of a few quiet requests waits for its first token, beside so many loud streams."""
    counts: list[int] = []
    while len(counts) < 10:
        async with open_tenant_replica(cell.cell_address) as replica:
            await replica.submit(LOUD, num_requests=num_streams, max_tokens=LONG)
            while (await replica.read()).num_tokens[LOUD.name] < min(num_streams, NUM_SLOTS):
                pass
            while len(counts) < 10 and (count := await replica.count_steps(QUIET, beside=LOUD)) is not None:
                counts.append(count)
    return max(counts)


@pytest.mark.slow
async def test_tokens_are_shared_by_weight(small_cell: Cell) -> None:
    heavy, light = Tenant("heavy", 3.0), Tenant("light", 1.0)
    num_tokens, num_ended = Counter[str](), Counter[str]()
    async with open_tenant_replica(small_cell.cell_address) as replica:
        await replica.submit(light, heavy, num_requests=80, max_tokens=100)
        while num_ended[heavy.name] < 80 - NUM_SLOTS:
            outputs = await replica.read()
            num_tokens += outputs.num_tokens
            num_ended.update(outputs.ended)
    assert 0.95 * 3 < num_tokens[heavy.name] / num_tokens[light.name] < 1.05 * 3


@pytest.mark.slow
async def test_a_quiet_tenant_waits_at_most_twice_as_long_beside_a_flood_as_beside_one_stream(small_cell: Cell) -> None:
    beside_one = await count_steps_to_first_token(small_cell, 1)
    assert await count_steps_to_first_token(small_cell, 5000) <= 2 * beside_one


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["streams", "choices", HTTP_KIND])
async def test_a_flood_that_fills_its_part_of_the_queue_shuts_out_nobody(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    keys = write_keys(tmp_path / "keys", key_line(KEY, LOUD.name), key_line("sk-quiet", QUIET.name))
    http_address = f"127.0.0.1:{free_port()}"
    flags = (
        f"--client-keys={keys}",
        f"--http-listen={http_address}",
        f"--scheduler.max-num-seqs={NUM_SLOTS}",
        "--scheduler.max-waiting-requests=20",
    )
    with start_cell(tiny_model, *flags) as cell:
        async with connect(cell) as client, run_flood(kind, 100, KEY, cell.address, http_address) as outcomes:
            await until_full(client)
            for number in range(5):
                request = token_request([1 + number, 2, 3], max_tokens=3, ignore_eos=True)
                answer = await read_answer(
                    client.tokenizer.Generate(request, metadata=(("authorization", "Bearer sk-quiet"),))
                )
                assert len(answer.choices[0, 0].token_ids) == 3
    assert outcomes.keys() <= {"OK", "QUEUE_FULL", "server_overloaded"}


async def until_full(client: Client) -> None:
    """Return once a request of the loud tenant with eight choices finds no place in the queue."""
    request = token_request([1, 2, 3], max_tokens=1, ignore_eos=True)
    request.sampling.n = 8
    while True:
        try:
            await read_answer(client.tokenizer.Generate(request, metadata=(("authorization", f"Bearer {KEY}"),)))
        except grpc.aio.AioRpcError as error:
            if reason_of(status_from_rpc_error(error)) != "QUEUE_FULL":
                raise
            return


@pytest.mark.proof
async def test_a_quiet_tenant_waits_at_most_twice_as_long_beside_5000_clients_as_beside_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", key_line(KEY, LOUD.name))
    flags = (f"--client-keys={keys}", f"--scheduler.max-num-seqs={NUM_SLOTS}", "--scheduler.max-waiting-requests=10000")
    with start_cell(tiny_model, *flags) as cell:
        beside_one = await count_steps_beside_clients(cell, 1)
        assert await count_steps_beside_clients(cell, 5000) <= 2 * beside_one


async def count_steps_beside_clients(cell: Cell, num_clients: int) -> int:
    """As `count_steps_to_first_token`, with loud streams through the tokenizer; a third tenant shows the steps."""
    counts: list[int] = []
    async with connect(cell) as client, open_channels(cell.address) as channels:
        clients = [
            asyncio.create_task(ask_for_ever(channels[number % len(channels)], number)) for number in range(num_clients)
        ]
        await client.wait_until(lambda state: state.num_running + state.num_waiting >= num_clients)
        async with open_tenant_replica(cell.cell_address) as replica:
            while len(counts) < 10:
                await replica.submit(WITNESS, num_requests=1, max_tokens=LONG)
                while not (await replica.read()).num_tokens[WITNESS.name]:
                    pass
                while len(counts) < 10 and (count := await replica.count_steps(QUIET, beside=WITNESS)) is not None:
                    counts.append(count)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return max(counts)


async def ask_for_ever(channel: grpc.aio.Channel, number: int) -> None:
    """Read one long answer after the other."""
    stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    request = token_request([1 + number % 50, 2, 3], max_tokens=LONG, ignore_eos=True)
    while True:
        async for _ in stub.Generate(request, metadata=(("authorization", f"Bearer {KEY}"),)):
            pass
