"""A poison request, which kills every process that computes it, fails without affecting other requests.

The other chaos tests show that no request is blamed for kills from outside.
"""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path

import grpc
import pytest

from lockstep.v1 import tokenizer_pb2
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.cells.cell import Cell
from tests.support.cells.chaos import MAGIC_TOKEN, Damage, Load, Peace, TellOf, chaos_cell
from tests.support.clients.client import Client, token_request

pytestmark = pytest.mark.slow


def poison() -> tokenizer_pb2.GenerateRequest:
    """A request that triggers the failpoint of the process that computes or plans it."""
    return token_request([5, MAGIC_TOKEN, 7], max_tokens=40, ignore_eos=True)


def num_deaths(cell: Cell, role: str) -> int:
    return len(re.findall(rf"exited; restarting role={role} ", cell.log()))


async def swallow(client: Client) -> str | None:
    """Send the poison request; returns the reason with which it fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client.generate(poison())
    return reason_of(status_from_rpc_error(error.value))


@pytest.mark.parametrize("role", ["worker", pytest.param("scheduler", marks=pytest.mark.proof)])
async def test_a_poisonous_request_fails_and_all_others_do_not(
    model_dir: Path, peace: Peace, role: str, tell_of: TellOf
) -> None:
    async with chaos_cell(model_dir, "--dp=2", f"--{role}.fail-on-token={MAGIC_TOKEN}") as (cell, client):
        load = Load(client, peace)
        async with load.keep_in_flight():
            await load.wait_for_state(lambda state: state.num_running >= len(peace.requests) / 2)
            async with asyncio.timeout(600):
                reason = await swallow(client)
        state = await load.wait_for_state(lambda state: not state.num_running and not state.num_waiting)
        deaths = num_deaths(cell, role)

    assert reason == "POISON_REQUEST"
    tell_of(load, deaths, state)
    assert load.damage == Damage()
    # More may run when the request comes than did before. A scheduler dies once more, after one that got nothing lived.
    assert deaths <= 3 + (role == "scheduler") + math.log2(len(peace.requests))
