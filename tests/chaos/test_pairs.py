"""A scheduler that dies together with workers, as when a node is lost: its successor takes the remaining workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.cells.chaos import Damage, Killer, Load, Peace, TellOf, chaos_cell, learn, stateful_requests

pytestmark = pytest.mark.slow

NUM_REQUESTS = 48
HITS = {
    "a worker": Killer.hit_the_scheduler_and_a_worker,
    "all workers": Killer.hit_the_scheduler_and_all_workers,
}


@pytest.fixture(scope="module")
def stateful_peace(moe_dir: Path) -> Peace:
    """The answers of a single rank."""
    return asyncio.run(learn(moe_dir, stateful_requests(NUM_REQUESTS)))


DP, EP = ["--dp=2"], ["--dp=2", "--ep"]


@pytest.mark.parametrize(
    ("flags", "together_with"),
    [
        pytest.param(DP, "a worker", id="a worker of dp", marks=pytest.mark.proof),
        pytest.param(EP, "all workers", id="all workers of dp x ep"),
        pytest.param(DP, "all workers", id="all workers of dp", marks=pytest.mark.proof),
        pytest.param(EP, "a worker", id="a worker of dp x ep", marks=pytest.mark.proof),
    ],
)
async def test_requests_outlive_a_scheduler_that_dies_together_with(
    moe_dir: Path, stateful_peace: Peace, together_with: str, flags: list[str], num_pairs: int, tell_of: TellOf
) -> None:
    async with chaos_cell(moe_dir, *flags) as (cell, client):
        load = Load(client, stateful_peace)
        killer = Killer(cell, load)
        async with load.keep_in_flight():
            for _ in range(num_pairs):
                await HITS[together_with](killer)
                await load.settle()
        state = await client.wait_until_idle()

    tell_of(load, killer.num_deaths, state)
    assert load.damage == Damage()
    assert load.num_answers >= NUM_REQUESTS
    assert load.num_resumes > 0
