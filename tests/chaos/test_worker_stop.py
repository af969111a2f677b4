"""Workers stopped by SIGSTOP: they are dropped, then killed and restarted, or resume too late."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.cells.chaos import HEALTH_KILL_S, Damage, Killer, Load, Peace, TellOf, chaos_cell

pytestmark = pytest.mark.slow

# The share of `--chaos-kills` made here; a third of those in `test_mixed.py` are stops too.
FACTOR = 0.6


@pytest.mark.proof
async def test_requests_outlive_workers_that_are_stopped(
    model_dir: Path, peace: Peace, num_kills: int, tell_of: TellOf
) -> None:
    num_stops = max(1, round(FACTOR * num_kills))
    async with chaos_cell(model_dir, "--dp=2", f"--health-kill-s={HEALTH_KILL_S}") as (cell, client):
        load = Load(client, peace)
        killer = Killer(cell, load)
        async with load.keep_in_flight():
            for _ in range(num_stops):
                await killer.hit_a_worker(signal.SIGSTOP)
                await load.settle()
        state = await client.wait_until_idle()
        log = cell.log()

    tell_of(load, killer.num_deaths, state)
    assert load.damage == Damage()
    assert load.num_answers >= len(peace.requests)
    assert log.count(f"had not answered its health check for {HEALTH_KILL_S} s") >= num_stops


async def test_a_worker_that_hangs_is_noticed_and_comes_back_to_no_harm(
    model_dir: Path, peace: Peace, tell_of: TellOf
) -> None:
    async with chaos_cell(model_dir, "--dp=2", "--health-kill-s=120") as (cell, client):
        load = Load(client, peace)
        async with load.keep_in_flight():
            await load.wait_for_state(lambda state: state.rank_steps[1].num_running >= 10)
            pid = cell.send_signal("worker 1.0", signal.SIGSTOP)
            await load.wait_for_state(lambda state: not state.rank_steps[1].is_attached)
            # The other rank has taken over its sequences.
            await load.wait_for_progress()
            cell.send_signal("worker 1.0", signal.SIGCONT)
            await load.wait_for_state(lambda state: state.rank_steps[1].is_attached and state.rank_steps[1].num_running)
        state = await client.wait_until_idle()
        after = cell.find_processes()

    tell_of(load, 1, state)
    assert load.damage == Damage()
    # The same process is used again, so no weights were reloaded.
    assert after["worker 1.0"].pid == pid
