"""How the cell's state is asked for, over real gRPC."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import scheduler_pb2
from services.tokenizer.exchange import cell_state
from services.tokenizer.exchange.cell_state import CellState
from shared.errors import NotReadyError
from shared.network.rpc import make_channel, make_server
from tests.support.tokenizer.exchange_peer import ExchangePeer

NUM_READERS = 20


@asynccontextmanager
async def connected(tmp_path: Path) -> AsyncIterator[tuple[ExchangePeer, grpc.aio.Channel]]:
    """A scheduler that does not tell its state yet, and a connection to it."""
    peer, address = ExchangePeer(exchange_pb2.CellInfo()), f"unix:{tmp_path}/cell"
    peer.may_tell.clear()
    server = make_server(address, [peer], internal=True)
    await server.start()
    async with make_channel(address, internal=True) as channel:
        yield peer, channel
    await server.stop(0)


async def test_all_who_ask_at_the_same_moment_share_a_call_and_may_leave(tmp_path: Path) -> None:
    async with connected(tmp_path) as (peer, channel):
        peer.state.num_running = 3
        state = CellState(lambda: channel, max_age_s=0.0)
        first, *others = [asyncio.create_task(state.read()) for _ in range(NUM_READERS)]
        await peer.states_asked.get()
        first.cancel()
        peer.may_tell.set()
        assert [each.num_running for each in await asyncio.gather(*others)] == [3] * len(others)
        assert peer.states_asked.empty()
        peer.state.num_running = 4
        assert (await state.read()).num_running == 4
        assert peer.states_asked.qsize() == 1


async def test_what_was_told_lately_is_told_again_but_not_by_another_link(tmp_path: Path) -> None:
    async with connected(tmp_path) as (peer, channel):
        peer.may_tell.set()
        links = [channel]
        state = CellState(lambda: links[-1], max_age_s=math.inf)
        for _ in range(NUM_READERS):
            assert await state.read() == scheduler_pb2.GetStateResponse()
            peer.state.num_running = 3
        assert peer.states_asked.qsize() == 1
        async with make_channel(f"unix:{tmp_path}/cell", internal=True) as next_channel:
            links.append(next_channel)
            assert (await state.read()).num_running == 3


async def test_a_failure_is_everybodys_who_waits_and_the_next_asks_again(tmp_path: Path) -> None:
    async with connected(tmp_path) as (peer, channel):
        links = [channel]
        state = CellState(lambda: links[-1])
        waiting = [asyncio.create_task(state.read()) for _ in range(NUM_READERS)]
        await peer.states_asked.get()
        # As the end of a link does.
        await channel.close()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {NotReadyError}
        peer.may_tell.set()
        async with make_channel(f"unix:{tmp_path}/cell", internal=True) as next_channel:
            links.append(next_channel)
            assert await state.read() == scheduler_pb2.GetStateResponse()


async def test_a_scheduler_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell_state, "_DEADLINE_S", 0.05)
    async with connected(tmp_path) as (_, channel):
        with pytest.raises(NotReadyError) as caught:
            await CellState(lambda: channel).read()
        assert caught.value.values == {"code": "DEADLINE_EXCEEDED"}
