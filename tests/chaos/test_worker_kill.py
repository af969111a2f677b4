"""Workers that are killed under load: nobody notices but by waiting."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.v1 import common_pb2
from tests.support.chaos import Damage, Killer, Load, Peace, State, TellOf, chaos_cell, learn, mixed_requests

pytestmark = pytest.mark.slow

# What a process of the real model costs in time, those of the small one do five times.
REAL_FACTOR = 0.2
# Where tokens may differ, what is judged is little.
INEXACT_FACTOR = 0.4
# Kills that do not wait until all ranks are at work again.
HASTY_FACTOR = 1.5


async def kill_workers(
    model_dir: Path, peace: Peace, num_kills: int, *, num_hasty: int = 0, backend: str = "reference"
) -> tuple[Load, State]:
    """Kill workers of two ranks, each when the last one is at work again, and so many more without waiting for it.

    Returns:
        What became of the requests.
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
    # Each row reads all weights, a prompt's rows too.
    for request in requests:
        del request.tokens.token_ids[8:]
        request.sampling.max_tokens //= 4
    peace = await learn(real_model, requests)
    load, state = await kill_workers(real_model, peace, max(1, round(REAL_FACTOR * num_kills)))
    tell_of(load, state.num_lost_epochs, state)
    assert load.damage == Damage()


async def test_without_exact_arithmetic_tokens_may_differ_and_nothing_is_lost(
    model_dir: Path, num_kills: int, num_requests: int, tell_of: TellOf
) -> None:
    requests = mixed_requests(num_requests, determinism=common_pb2.DETERMINISM_UNSPECIFIED)
    peace = await learn(model_dir, requests, backend="cpu")
    load, state = await kill_workers(model_dir, peace, max(1, round(INEXACT_FACTOR * num_kills)), backend="cpu")
    tell_of(load, state.num_lost_epochs, state)
    # What differs is told, not judged: sums go by the batch that a row is in.
    assert load.damage.lost == []
