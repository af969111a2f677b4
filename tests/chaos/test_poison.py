"""A request that kills whoever computes it ends alone, and what is killed from outside is nobody's fault."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path

import grpc
import pytest

from lockstep.v1 import tokenizer_pb2
from shared.rpc import reason_of, status_from_rpc_error
from tests.support.cell import Cell
from tests.support.chaos import MAGIC_TOKEN, Damage, Killer, Load, Peace, TellOf, chaos_cell
from tests.support.client import Client, token_request

pytestmark = pytest.mark.slow

# How many times as often as in other tests services are killed from outside.
OUTSIDE_FACTOR = 2.5


def poison() -> tokenizer_pb2.GenerateRequest:
    """A request that meets the failpoint of whoever computes or plans it."""
    return token_request([5, MAGIC_TOKEN, 7], max_tokens=40, ignore_eos=True)


def num_deaths(cell: Cell, role: str) -> int:
    return len(re.findall(rf"exited and is started again role={role} ", cell.log()))


async def swallow(client: Client) -> str | None:
    """Send the poison; returns the reason that it ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.generate(poison())
    return reason_of(status_from_rpc_error(error.value))


@pytest.mark.parametrize("role", ["worker", "scheduler"])
async def test_a_poisonous_request_fails_and_all_others_do_not(
    model_dir: Path, peace: Peace, role: str, tell_of: TellOf
) -> None:
    async with chaos_cell(model_dir, "--dp=2", f"--{role}.fail-on-token={MAGIC_TOKEN}") as (cell, client):
        load = Load(client, peace)
        async with load.keep_in_flight():
            before = await load.wait_for_state(lambda state: state.num_running >= len(peace.requests) / 2)
            async with asyncio.timeout(600):
                reason = await swallow(client)
        state = await load.wait_for_state(lambda state: not state.num_running and not state.num_waiting)
        deaths = num_deaths(cell, role)

    assert reason == "POISON_REQUEST"
    tell_of(load, deaths, state)
    assert load.damage == Damage()
    assert deaths <= 3 + math.log2(before.num_running)


async def test_kills_from_outside_poison_nobody(model_dir: Path, peace: Peace, num_kills: int, tell_of: TellOf) -> None:
    async with chaos_cell(model_dir, "--dp=2") as (cell, client):
        load = Load(client, peace)
        killer = Killer(cell, load)
        async with load.keep_in_flight():
            for _ in range(round(OUTSIDE_FACTOR * num_kills)):
                await killer.hit_a_worker()
        state = await client.wait_until_idle()

    tell_of(load, killer.num_deaths, state)
    assert load.damage == Damage()
