"""Workers and schedulers that are killed and stopped in rotation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cells.chaos import HEALTH_KILL_S, Damage, Killer, Load, Peace, TellOf, chaos_cell

pytestmark = pytest.mark.slow

# Each kind once.
MIN_KILLS = 3


async def test_requests_outlive_whatever_dies_or_hangs(
    model_dir: Path, peace: Peace, num_kills: int, tell_of: TellOf
) -> None:
    async with chaos_cell(model_dir, "--dp=2", f"--health-kill-s={HEALTH_KILL_S}") as (cell, client):
        load = Load(client, peace)
        killer = Killer(cell, load)
        async with load.keep_in_flight():
            for _ in range(max(num_kills, MIN_KILLS)):
                await killer.hit_anything()
                await load.settle()
        state = await client.wait_until_idle()

    tell_of(load, killer.num_deaths, state)
    assert load.damage == Damage()
    assert load.num_answers >= len(peace.requests)
    assert killer.num_deaths == max(num_kills, MIN_KILLS)
