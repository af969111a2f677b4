"""The trial of suspects goes to one replica at a time."""

from __future__ import annotations

from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.internal.v1 import exchange_pb2
from services.scheduler.server.trials import Trials
from tests.support.scheduler.scheduler_shell import ReplicaStream, running_cell


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_one_of_those_that_ask_has_it_until_it_asks_no_more_and_each_gets_it(seed: int) -> None:
    rng, trials = Random(seed), Trials()
    asking: list[int] = []
    for _ in range(60):
        client = rng.randrange(4)
        kind = rng.choice(["ask", "ask", "stop", "unlink"])
        if kind == "unlink":
            trials.unlink(client)
        else:
            trials.note(client, is_trying=kind == "ask")
        if kind == "ask" and client not in asking:
            asking.append(client)
        elif kind != "ask" and client in asking:
            asking.remove(client)
        assert [one for one in range(4) if trials.is_given_to(one)] == asking[:1]


async def until_told(replica: ReplicaStream, *, has_trial: bool) -> None:
    """Read heartbeats until one says so, as all that follow do."""
    while (await replica.read_heartbeat()).has_trial != has_trial:
        pass
    assert (await replica.read_heartbeat()).has_trial == has_trial


async def test_heartbeats_give_the_trial_to_the_first_and_to_the_next_when_its_replica_dies(tmp_path: Path) -> None:
    asks = exchange_pb2.ExchangeRequest(is_heartbeat=True, is_trying=True)
    async with running_cell(tmp_path) as cell:
        first, second = cell.exchange(), cell.exchange()
        await first.write(asks)
        await until_told(first, has_trial=True)
        await second.write(asks)
        await until_told(second, has_trial=False)
        first.cancel()
        await until_told(second, has_trial=True)
        await second.write(exchange_pb2.ExchangeRequest(is_heartbeat=True))
        await until_told(second, has_trial=False)
