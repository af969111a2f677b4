"""A scheduler that dies when a step of coupled groups has reached one of them: it must not hang the other."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.chaos import WORKER_FLAGS, Damage, Load, Peace, TellOf, chaos_cell, learn, mixed_requests
from tests.support.coupled_workers import CoupledWorkers
from tests.support.tcp_path import TcpPath

pytestmark = pytest.mark.slow

# For the other group to begin the step that the cut one does not get.
STEP_S = 0.5
# Of the test's kills: those that are found out by waiting for seconds and starting the domain again take long.
FACTOR = 0.4


@pytest.fixture(scope="module")
def moe_peace(moe_dir: Path) -> Peace:
    """What one rank by itself answers."""
    return asyncio.run(learn(moe_dir, mixed_requests(48)))


@pytest.mark.parametrize("is_lost", [False, True], ids=["the step comes late", "the step never comes"])
async def test_a_scheduler_dies_between_the_groups_of_a_step(
    moe_dir: Path, moe_peace: Peace, num_kills: int, is_lost: bool, tell_of: TellOf
) -> None:
    workers = CoupledWorkers(moe_dir, 2, "--ops-backend=reference", *WORKER_FLAGS)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(workers.running())
        path = await stack.enter_async_context(TcpPath(workers.ports[1]))
        addresses = f"--workers=127.0.0.1:{workers.ports[0]},127.0.0.1:{path.port}"
        cell, client = await stack.enter_async_context(chaos_cell(moe_dir, addresses, "--ep", has_workers=False))
        load = Load(client, moe_peace)
        num_deaths = max(1, round(FACTOR * num_kills))
        async with load.keep_in_flight():
            for _ in range(num_deaths):
                await load.wait_until_busy(0)
                path.cut(to_client=False)
                await asyncio.sleep(STEP_S)
                pid = cell.kill("scheduler")
                if is_lost:
                    path.lose()
                path.heal()
                await cell.wait_until_serving("scheduler", instead_of=pid)
                await load.settle()
        state = await client.wait_until_idle()

    tell_of(load, num_deaths, state)
    assert load.damage == Damage()
    assert load.num_resumes > 0
    assert state.num_used_blocks == 0
    # One group waits for ever in a step that the other never began: only new processes help.
    assert workers.num_starts > 1 or not is_lost
