"""A gateway that follows a real cell's KV events, with the code that the documents give it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from shared.network.rpc import make_channel
from tests.support.cells.cell import REFERENCE, Cell, start_cell
from tests.support.clients.client import Client, connect, token_request
from tests.support.clients.kv_subscriber import KvSubscriber
from tests.support.system.processes import ROOT

BLOCK_SIZE = 16
SAMPLE = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)

Hash = Callable[[list[int], str, int], list[int]]


@pytest.fixture(scope="module")
def cell(tiny_model: Path) -> Iterator[Cell]:
    """A cell of two ranks."""
    with start_cell(tiny_model, "--dp=2", REFERENCE, "--worker.kv-cache-num-blocks=64") as cell:
        yield cell


@asynccontextmanager
async def operator(cell: Cell) -> AsyncIterator[Any]:
    """A stub of SchedulerService on the cell's port."""
    async with make_channel(cell.cell_address, internal=True) as channel:
        yield scheduler_pb2_grpc.SchedulerServiceStub(channel)


@pytest.fixture(scope="module")
def hash_blocks(tmp_path_factory: pytest.TempPathFactory) -> Hash:
    """`hash_blocks` as protos/README.md prints it."""
    samples = SAMPLE.findall((ROOT / "protos" / "README.md").read_text(encoding="utf-8"))
    [source] = [sample for sample in samples if "def hash_blocks" in sample]
    file = tmp_path_factory.mktemp("sample") / "sample.py"
    file.write_text(source, encoding="utf-8")
    sample = ModuleType("sample")
    SourceFileLoader(sample.__name__, str(file)).exec_module(sample)
    function: Hash = sample.hash_blocks
    return function


async def hashes_of(client: Client, hash_blocks: Hash, prompt: list[int], salt: str = "") -> set[int]:
    """Have a prompt computed, unless it is cached; returns the hashes of its blocks and of its answer's."""
    request = token_request(prompt, max_tokens=24, ignore_eos=True)
    request.cache_salt = salt
    completion = await client.generate(request)
    # The last token is never computed.
    return set(hash_blocks([*prompt, *completion.token_ids[:-1]], salt, BLOCK_SIZE))


def both(gateway: KvSubscriber) -> set[int]:
    """What the two ranks hold together."""
    return gateway.hashes(0) | gateway.hashes(1)


async def test_a_gateway_knows_what_each_rank_has_cached(cell: Cell, hash_blocks: Hash) -> None:
    prompt = list(range(20, 70))
    async with operator(cell) as scheduler, connect(cell) as client:
        await client.wait_until(lambda state: all(rank.is_attached for rank in state.rank_steps))
        gateway = KvSubscriber(scheduler)
        await gateway.read_snapshots(2)
        plain = await hashes_of(client, hash_blocks, prompt)
        salted = await hashes_of(client, hash_blocks, prompt, "tenant")
        assert not plain & salted
        await gateway.read_until(lambda: both(gateway) == plain | salted)
        late = KvSubscriber(scheduler)
        await late.read_snapshots(2)
        assert [late.indexes[rank].blocks for rank in (0, 1)] == [gateway.indexes[rank].blocks for rank in (0, 1)]
        # Of whole prompts that the gateway's sets have, the cell finds all blocks.
        again = token_request(prompt, max_tokens=1)
        usage = (await client.generate(again)).finish.usage  # type: ignore[union-attr]
        assert usage.num_cached_tokens == BLOCK_SIZE * len(set(hash_blocks(prompt, "", BLOCK_SIZE)) & both(late))


@pytest.mark.slow
async def test_a_killed_worker_and_a_flush_clear_what_a_gateway_knows(cell: Cell, hash_blocks: Hash) -> None:
    async with operator(cell) as scheduler, connect(cell) as client:
        gateway = KvSubscriber(scheduler)
        await gateway.read_snapshots(2)
        known = await hashes_of(client, hash_blocks, list(range(100, 150)))
        await gateway.read_until(lambda: known <= both(gateway))
        rank = next(rank for rank in (0, 1) if known <= gateway.hashes(rank))
        other = gateway.hashes(1 - rank)
        cell.kill(f"worker {rank}.0")
        await gateway.read_until_held(set(), rank)
        assert gateway.hashes(1 - rank) == other
        await client.wait_until(lambda state: all(rank.is_attached for rank in state.rank_steps))
        known = await hashes_of(client, hash_blocks, list(range(150, 200)))
        await gateway.read_until(lambda: known <= both(gateway))
        async with make_channel(cell.cell_address, internal=True) as channel:
            admin = scheduler_pb2_grpc.SchedulerAdminServiceStub(channel)
            await admin.FlushPrefixCache(scheduler_pb2.FlushPrefixCacheRequest())
        await gateway.read_until(lambda: not both(gateway))
