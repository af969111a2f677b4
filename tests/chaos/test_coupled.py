"""A scheduler that dies after sending a step to only one of two coupled groups must not hang that group."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.cells.chaos import WORKER_FLAGS, Damage, Load, Peace, TellOf, chaos_cell, learn, mixed_requests
from tests.support.cells.coupled_workers import CoupledWorkers
from tests.support.system.tcp_path import TcpPath

pytestmark = pytest.mark.slow

# Time for the other group to begin the step that the cut-off group never receives.
STEP_S = 0.5
# The share of `--chaos-kills` made here: each takes seconds to detect, and a restart of the domain.
FACTOR = 0.4
MORE_DEATHS = 5


@pytest.fixture(scope="module")
def moe_peace(moe_dir: Path) -> Peace:
    """The answers of a single rank."""
    return asyncio.run(learn(moe_dir, mixed_requests(48)))


@pytest.mark.parametrize(
    "is_lost",
    [
        pytest.param(False, id="the step comes late", marks=pytest.mark.proof),
        pytest.param(True, id="the step never comes"),
    ],
)
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
        num_deaths, least = 0, max(1, round(FACTOR * num_kills))
        async with load.keep_in_flight():
            # Beside busy processes a death can come before the other group has begun its step: then there is another.
            while num_deaths < least or (is_lost and workers.num_starts == 1 and num_deaths < least + MORE_DEATHS):
                num_deaths += 1
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
    # One group waits forever in a step that the other never began, which only a restart of the domain resolves.
    assert workers.num_starts > 1 or not is_lost
