"""What every door of a scheduler says of its workers: heartbeats to replicas, grpc.health, GetState."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep.v1 import scheduler_pb2
from services.scheduler.server.listeners import CELL_SERVICES, PUBLIC_SERVICES
from tests.support.scheduler.gated_worker import GatedWorker
from tests.support.scheduler.scheduler_shell import NUM_EAGER_QUESTIONS, Cell, running_cell
from tests.support.system.polling import poll_until

SERVING = health_pb2.HealthCheckResponse.SERVING
Said = tuple[bool, bool]


async def is_serving(channel: Any, service: str) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return bool(answer.status == SERVING)


async def ask_all(cell: Cell) -> tuple[set[bool], set[bool]]:
    """What all doors say: whether workers are held, and whether they take work."""
    link = cell.server.connect()
    link.close(None)
    messages: list[Any] = [message async for message in link.messages()]
    heartbeat = messages[-1].heartbeat
    state = await cell.state()
    held, taken = {heartbeat.holds_workers, state.ready}, {heartbeat.takes_work, state.takes_work}
    for channel, services in ((cell.channel, PUBLIC_SERVICES), (cell.cell_channel, CELL_SERVICES)):
        held |= {await is_serving(channel, service) for service in services}
        taken.add(await is_serving(channel, ""))
    return held, taken


def open_gates(cell: Cell, *ranks: int) -> None:
    for rank in ranks:
        worker = cell.workers[rank]
        assert isinstance(worker, GatedWorker)
        worker.gate.set()


async def attach(cell: Cell, *ranks: int) -> None:
    open_gates(cell, *ranks)
    await cell.wait_until(lambda state: [rank.is_attached for rank in state.rank_steps].count(True) >= len(ranks))


async def drain_all(cell: Cell) -> None:
    await attach(cell, 0, 1)
    for rank in (0, 1):
        await cell.admin.Drain(scheduler_pb2.DrainRequest(dp_rank=rank))


async def undrain_one(cell: Cell) -> None:
    await drain_all(cell)
    # Where ranks are coupled, any rank names all of them.
    for rank in (0, 1):
        await cell.admin.Undrain(scheduler_pb2.UndrainRequest(dp_rank=rank))


async def offer_one(cell: Cell) -> None:
    """Only the first rank answers an offer."""
    open_gates(cell, 0)
    await cell.wait_until(lambda _: cell.workers[0].attaches)


async def lose_all(cell: Cell) -> None:
    await attach(cell, 0, 1)
    for worker in cell.workers:
        worker.is_silent = True
    await cell.wait_until(lambda state: not any(rank.is_attached for rank in state.rank_steps))


async def nothing(cell: Cell) -> None:
    """No worker answers."""


State = tuple[Callable[[Cell], Awaitable[None]], tuple[bool, bool], tuple[bool, bool]]
# What happens; whether workers are held and take work then, if the two ranks are not coupled, and if they are.
STATES: dict[str, State] = {
    "no worker answers": (nothing, (False, False), (False, False)),
    "one of two ranks": (offer_one, (True, True), (False, False)),
    "all ranks": (lambda cell: attach(cell, 0, 1), (True, True), (True, True)),
    "all ranks drained": (drain_all, (True, False), (True, False)),
    "undrained": (undrain_one, (True, True), (True, True)),
    "all ranks lost": (lose_all, (False, False), (False, False)),
}


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("name", STATES)
async def test_all_doors_say_the_same(tmp_path: Path, name: str, coupled: bool) -> None:
    reach, uncoupled_said, coupled_said = STATES[name]
    holds_workers, takes_work = coupled_said if coupled else uncoupled_said
    settings = {"worker_silence_s": 1.0} if name == "all ranks lost" else {}
    async with running_cell(tmp_path, GatedWorker(), GatedWorker(), coupled=coupled, **settings) as cell:
        await reach(cell)
        expected = ({holds_workers}, {takes_work})
        # Statuses of grpc.health follow in the next turns of the event loop.
        await poll_until(lambda: ask_all(cell), lambda said: said == expected, num_eager=NUM_EAGER_QUESTIONS)
        # An answer that is due holds the end of its server.
        open_gates(cell, 0, 1)
