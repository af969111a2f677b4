"""A network that drops all packets between scheduler and workers for a while, in one or both directions."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.cells.chaos import WORKER_FLAGS, Damage, Load, Peace, TellOf, chaos_cell
from tests.support.system.ports import free_port
from tests.support.system.processes import start_service
from tests.support.system.tcp_path import TcpPath

pytestmark = pytest.mark.slow

NUM_RANKS = 2
# Shorter than the silence timeouts.
SHORT_CUTS_S = (1, 3)


# The last cut is detected and lasts until the scheduler has reconnected. Where the worker receives an offer but cannot
# answer it, it lasts until that offer has timed out and another one was made.
@pytest.mark.parametrize(
    ("direction", "num_offers"),
    [
        pytest.param({"to_client": False}, 1, id="to the worker", marks=pytest.mark.proof),
        pytest.param({"to_server": False}, 2, id="to the scheduler"),
        pytest.param({}, 1, id="in both directions", marks=pytest.mark.proof),
    ],
)
async def test_requests_outlive_a_network_that_drops_everything(
    model_dir: Path, peace: Peace, direction: dict[str, bool], num_offers: int, tell_of: TellOf
) -> None:
    async with AsyncExitStack() as stack:
        paths = []
        for rank in range(NUM_RANKS):
            port = free_port()
            place = [f"--listen=127.0.0.1:{port}", f"--dp-rank={rank}", f"--dp-size={NUM_RANKS}"]
            flags = [f"--model-dir={model_dir}", "--ops-backend=reference", "--num-threads=1", *WORKER_FLAGS]
            stack.enter_context(start_service("worker", *place, *flags))
            paths.append(await stack.enter_async_context(TcpPath(port)))
        workers = ",".join(f"127.0.0.1:{path.port}" for path in paths)
        _, client = await stack.enter_async_context(chaos_cell(model_dir, f"--workers={workers}", has_workers=False))
        load = Load(client, peace)
        await load.wait_for_state(lambda state: all(rank.is_attached for rank in state.rank_steps))
        async with load.keep_in_flight():
            for rank, cut_s in enumerate(SHORT_CUTS_S):
                await load.wait_until_busy(rank)
                paths[rank].cut(**direction)
                await asyncio.sleep(cut_s)
                paths[rank].heal()
                await load.settle()
            await load.wait_until_busy(0)
            num_connections = paths[0].num_connections
            paths[0].cut(**direction)
            await load.wait_for_state(lambda state: not state.rank_steps[0].is_attached)
            await paths[0].wait_for_connections(num_connections + num_offers)
            paths[0].heal()
            await load.settle()
        state = await client.wait_until_idle()

    tell_of(load, state.num_lost_epochs, state)
    assert load.damage == Damage()
    assert state.num_lost_epochs > 0
