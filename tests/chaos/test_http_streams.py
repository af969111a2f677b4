"""Workers and schedulers that are killed under streams over HTTP: clients notice only a delay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.cells.chaos import MAGIC_TOKEN, Damage, Killer, Load, Peace, TellOf, mixed_requests
from tests.support.cells.http_load import HttpAsker, http_chaos_cell, learn_over_http
from tests.support.clients.http_answers import COMPLETION, RefusedError, collect, open_stream, read_pieces

pytestmark = pytest.mark.slow

NUM_STREAMS = 50


@pytest.fixture(scope="module")
def http_peace(model_dir: Path) -> Peace:
    """Requests of every kind, with what their streams are in an undisturbed run."""
    return asyncio.run(learn_over_http(model_dir, mixed_requests(NUM_STREAMS)))


@pytest.mark.parametrize(
    "hit",
    [
        pytest.param(Killer.hit_a_worker, id="worker"),
        pytest.param(Killer.hit_the_scheduler, id="scheduler", marks=pytest.mark.proof),
    ],
)
async def test_streams_outlive_services_that_are_killed(
    model_dir: Path, http_peace: Peace, num_kills: int, hit: Callable[[Killer], Awaitable[None]], tell_of: TellOf
) -> None:
    async with http_chaos_cell(model_dir, "--dp=2") as (cell, client, session):
        load = Load(client, http_peace, asker=HttpAsker(session))
        killer = Killer(cell, load)
        async with load.keep_in_flight():
            for _ in range(num_kills):
                await hit(killer)
                await load.settle()
        state = await client.wait_until_idle()
    tell_of(load, killer.num_deaths, state)
    assert load.damage == Damage()
    assert load.num_answers >= NUM_STREAMS
    assert load.num_resumes > 0


@pytest.mark.proof
async def test_a_stream_that_becomes_poison_ends_with_an_error(
    model_dir: Path, http_peace: Peace, tell_of: TellOf
) -> None:
    """Its first token is one that the worker fails on as soon as it has to compute the tokens so far again."""
    body = {
        "prompt": [5, 7],
        "max_tokens": 400,
        "ignore_eos": True,
        "temperature": 0,
        "logit_bias": {str(MAGIC_TOKEN): 100},
        "return_token_ids": True,
    }
    async with http_chaos_cell(model_dir, f"--worker.fail-on-token={MAGIC_TOKEN}") as (cell, client, session):
        load = Load(client, http_peace, asker=HttpAsker(session))
        async with load.keep_in_flight():
            await load.wait_for_state(lambda state: state.num_running >= NUM_STREAMS / 2)
            async with open_stream(session, COMPLETION, body) as response:
                pieces = [await anext(read_pieces(response))]
                cell.kill("worker")
                with pytest.raises(RefusedError) as failure:
                    await collect(response, pieces)
        state = await load.wait_for_state(lambda state: not state.num_running and not state.num_waiting)
    tell_of(load, state.num_lost_epochs, state)
    assert (failure.value.status, failure.value.code) == (200, "poison_request")
    token_ids = [token_id for piece in pieces for token_id in piece["choices"][0]["token_ids"]]
    assert set(token_ids) == {MAGIC_TOKEN}
    assert load.damage == Damage()
    assert state.num_used_blocks == 0
