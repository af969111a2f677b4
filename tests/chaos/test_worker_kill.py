"""Workers that are killed under load: clients notice only a delay."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.v1 import common_pb2
from tests.support.cells.chaos import Damage, Killer, Load, Peace, State, TellOf, chaos_cell, learn, mixed_requests

pytestmark = pytest.mark.slow

# The share of `--chaos-kills` for the real model, whose processes take five times as long to restart.
REAL_FACTOR = 0.2
# The share of `--chaos-kills` where tokens may differ, since little is checked then.
INEXACT_FACTOR = 0.4
# The factor for kills that do not wait until all ranks are attached again.
HASTY_FACTOR = 1.5


async def kill_workers(
    model_dir: Path, peace: Peace, num_kills: int, *, num_hasty: int = 0, backend: str = "reference"
) -> tuple[Load, State]:
    """Kill workers of two ranks, each after recovery from the last kill, and `num_hasty` more without waiting for it.

    Returns:
        The load and the scheduler's last state.
    """
    async with chaos_cell(model_dir, "--dp=2", backend=backend) as (cell, client):
        load = Load(client, peace)
        killer = Killer(cell, load)
        async with load.keep_in_flight():
            for _ in range(num_kills):
                await killer.hit_a_worker()
                await load.settle()
            for _ in range(num_hasty):
                await killer.hit_a_worker()
        state = await client.wait_until_idle()
    assert load.num_answers >= len(peace.requests)
    assert load.num_resumes > 0
    assert state.num_lost_epochs >= num_kills
    return load, state


async def test_requests_outlive_workers_that_are_killed_and_none_is_taken_for_poison(
    model_dir: Path, peace: Peace, num_kills: int, tell_of: TellOf
) -> None:
    load, state = await kill_workers(model_dir, peace, num_kills, num_hasty=round(HASTY_FACTOR * num_kills))
    tell_of(load, state.num_lost_epochs, state)
    assert load.damage == Damage()


async def test_requests_to_the_real_model_outlive_workers_that_are_killed(
    real_model: Path, num_kills: int, tell_of: TellOf
) -> None:
    requests = mixed_requests(24)
    # On this backend every row reads all weights, including each row of a prompt.
    for request in requests:
        del request.tokens.token_ids[8:]
        request.sampling.max_tokens //= 4
    peace = await learn(real_model, requests)
    load, state = await kill_workers(real_model, peace, max(1, round(REAL_FACTOR * num_kills)))
    tell_of(load, state.num_lost_epochs, state)
    assert load.damage == Damage()


@pytest.mark.proof
async def test_without_exact_arithmetic_tokens_may_differ_and_nothing_is_lost(
    model_dir: Path, num_kills: int, num_requests: int, tell_of: TellOf
) -> None:
    requests = mixed_requests(num_requests, determinism=common_pb2.DETERMINISM_UNSPECIFIED)
    peace = await learn(model_dir, requests, backend="native")
    load, state = await kill_workers(model_dir, peace, max(1, round(INEXACT_FACTOR * num_kills)), backend="native")
    tell_of(load, state.num_lost_epochs, state)
    # Differences are reported but allowed: on this backend sums depend on the batch.
    assert load.damage.lost == []
