"""Every process of a cell is asked to end and replaced, one after the other, under load: a rolling restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chaos import Damage, Load, Peace, State, TellOf
from tests.support.rolling_cell import RollingCell, RollingClient, connect_to_all, run_rolling_cell

pytestmark = pytest.mark.slow


async def replace_worker(cell: RollingCell, load: Load, rank: int) -> None:
    """Drain a busy worker, and wait until another one has taken its place."""
    await load.wait_until_busy(rank)
    assert await cell.drain(f"worker {rank}") == 0
    cell.start(f"worker {rank}")
    await load.settle()


async def replace_tokenizer(cell: RollingCell, load: Load, number: int) -> None:
    """Drain a tokenizer, and wait until another one has taken its place."""
    await load.wait_for_progress()
    assert await cell.drain(f"tokenizer {number}") == 0
    cell.start(f"tokenizer {number}")
    await cell.wait_until_serving(f"tokenizer {number}")


async def replace_scheduler(cell: RollingCell, client: RollingClient, load: Load, number: int) -> State:
    """End a busy scheduler while another one is ready to take over; returns the last state of the one that ended."""
    cell.start(f"scheduler {1 - number}")
    await load.wait_until_busy(0)
    state = await client.state()
    assert await cell.drain(f"scheduler {number}") == 0
    await load.settle()
    return state


@pytest.mark.parametrize("drain_s", [30.0, 0.3], ids=["answers finish", "answers move"])
async def test_a_rolling_restart_of_every_process_is_not_noticed(
    model_dir: Path, peace: Peace, tmp_path: Path, drain_s: float, tell_of: TellOf, num_kills: int
) -> None:
    if drain_s > 1 and num_kills <= 5:
        pytest.skip("takes a minute, and needs no other code than the other case: `make chaos` runs it")
    with run_rolling_cell(model_dir, tmp_path, drain_s=drain_s) as cell:
        async with connect_to_all(cell) as client:
            load = Load(client, peace)
            await load.wait_for_state(lambda state: all(rank.is_attached for rank in state.rank_steps))
            for number in (0, 1):
                await cell.wait_until_serving(f"tokenizer {number}")
            states = []
            async with load.keep_in_flight():
                for number in (0, 1):
                    await replace_worker(cell, load, number)
                    await replace_tokenizer(cell, load, number)
                num_resumes = load.num_resumes
                states += [await replace_scheduler(cell, client, load, number) for number in (0, 1)]
            states.append(await client.wait_until_idle())

    tell_of(load, 6, states[-1])
    assert load.damage == Damage()
    assert load.num_answers >= len(peace.requests)
    # Only a short drain interrupts answers.
    assert (num_resumes > 0) is (drain_s < 1)
    for state in states:
        assert (state.num_lost_epochs, state.num_suspects, state.num_poison_requests) == (0, 0, 0)
