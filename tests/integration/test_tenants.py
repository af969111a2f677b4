"""Tenants of a real cell get their shares, however many streams one of them has."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import grpc
import pytest

from lockstep.v1 import tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from tests.support.cells.cell import start_cell
from tests.support.clients.client import token_request
from tests.support.clients.key_files import key_line, write_keys

pytestmark = pytest.mark.slow

NUM_SLOTS = 8
NUM_STREAMS = 40
# Whatever the shares are, they have settled after the first and are measured over the second, in tokens.
WARM_UP, MEASURED = 4000, 20000


def key_of(tenant: str) -> str:
    """The key of a tenant's clients."""
    return f"sk-{tenant}"


def start_shared_cell(model: Path, directory: Path, **weights: float) -> Any:
    """A cell with few slots whose tenants have these weights."""
    lines = [key_line(key_of(tenant), tenant, weight=weight) for tenant, weight in weights.items()]
    return start_cell(
        model, f"--client-keys={write_keys(directory / 'keys', *lines)}", f"--scheduler.max-num-seqs={NUM_SLOTS}"
    )


class Tokens:
    """How many tokens all tenants have got."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._waited: list[tuple[int, asyncio.Event]] = []

    def add(self, num_tokens: int) -> None:
        """Count tokens."""
        self.num_tokens += num_tokens
        for least, event in self._waited:
            if self.num_tokens >= least:
                event.set()

    async def wait(self, least: int) -> None:
        """Wait until there are so many."""
        event = asyncio.Event()
        self._waited.append((least, event))
        await event.wait()


class Tenant:
    """A client with a key, which counts the tokens that it gets."""

    def __init__(self, channel: grpc.aio.Channel, name: str, total: Tokens) -> None:
        self.num_tokens = 0
        self._total = total
        self._stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {key_of(name)}"),)
        self._seeds = itertools.count()

    async def ask(self, max_tokens: int) -> None:
        """Read one answer."""
        request = token_request([1 + next(self._seeds) % 50, 2, 3], max_tokens=max_tokens, ignore_eos=True)
        async for response in self._stub.Generate(request, metadata=self._metadata):
            self.num_tokens += len(response.token_ids)
            self._total.add(len(response.token_ids))

    async def flood(self) -> None:
        """Keep many streams open, for ever."""

        async def ask_for_ever() -> None:
            while True:
                await self.ask(max_tokens=100)

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_STREAMS):
                group.create_task(ask_for_ever())


async def test_tokens_are_shared_by_weight(tiny_model: Path, tmp_path: Path) -> None:
    with start_shared_cell(tiny_model, tmp_path, heavy=3.0, light=1.0) as cell:
        async with make_channel(cell.address) as channel:
            total = Tokens()
            heavy, light = Tenant(channel, "heavy", total), Tenant(channel, "light", total)
            floods = [asyncio.create_task(tenant.flood()) for tenant in (heavy, light)]
            await total.wait(WARM_UP)
            before = heavy.num_tokens, light.num_tokens
            await total.wait(WARM_UP + MEASURED)
            ratio = (heavy.num_tokens - before[0]) / (light.num_tokens - before[1])
            for flood in floods:
                flood.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
    assert 0.95 * 3 < ratio < 1.05 * 3


async def test_a_quiet_tenant_waits_no_longer_beside_a_flood_than_beside_one_stream(
    tiny_model: Path, tmp_path: Path
) -> None:
    with start_shared_cell(tiny_model, tmp_path, loud=1.0, quiet=1.0) as cell:
        async with make_channel(cell.address) as channel:
            total = Tokens()
            loud, quiet = Tenant(channel, "loud", total), Tenant(channel, "quiet", total)
            flood = asyncio.create_task(loud.flood())
            await total.wait(WARM_UP)
            for _ in range(20):
                before = loud.num_tokens
                await quiet.ask(max_tokens=1)
                # A step gives each of the loud one's slots a token; some are in flight, and some on the wire.
                assert loud.num_tokens - before < 20 * NUM_SLOTS
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)
