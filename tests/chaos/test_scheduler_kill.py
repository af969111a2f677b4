"""A scheduler that is killed under load: the tokenizer resubmits the running requests to its successor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cells.chaos import Damage, Killer, Load, Peace, TellOf, chaos_cell

pytestmark = pytest.mark.slow


async def test_requests_outlive_schedulers_that_are_killed(
    model_dir: Path, peace: Peace, num_kills: int, tell_of: TellOf
) -> None:
    async with chaos_cell(model_dir, "--dp=2") as (cell, client):
        load = Load(client, peace)
        killer = Killer(cell, load)
        workers = {name: process.pid for name, process in cell.role_to_process.items() if name.startswith("worker")}
        async with load.keep_in_flight():
            for _ in range(num_kills):
                await killer.hit_the_scheduler()
                await load.settle()
        state = await client.wait_until_idle()
        after = cell.find_processes()

    tell_of(load, killer.num_deaths, state)
    assert load.damage == Damage()
    assert load.num_answers >= len(peace.requests)
    assert load.num_resumes > 0
    assert state.num_used_blocks == 0
    # The workers kept running, so they did not reload their weights.
    assert {name: after[name].pid for name in workers} == workers
