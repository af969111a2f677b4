"""What every door says of a replica's health, in every state of its cell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.server.readiness import Readiness, find_bridging_s
from services.tokenizer.server.servicer import TOKENIZER_SERVICE
from shared.network.health import Health
from shared.network.probes import Probes
from tests.support.system.ports import free_port
from tests.support.tokenizer.exchange_peer import Row
from tests.support.tokenizer.tokenizer_service import Service, run_tokenizer_service

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
HEALTH, READY, PROCESS = "health", "readiness", "process"
# What each door tells.
DOORS = {
    "grpc.health": HEALTH,
    "GET /health": HEALTH,
    f"grpc.health {TOKENIZER_SERVICE}": READY,
    "GET /readyz": READY,
    "GET /readyz of the management port": READY,
    "GET /ping": PROCESS,
    "GET /livez of the management port": PROCESS,
    "GET /startupz of the management port": PROCESS,
}
LONG_S, NONE_S = 300.0, 0.0


@asynccontextmanager
async def doors(model_dir: Path, tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Service, Any]]:
    """A service, and a function that asks all doors and returns what they say, by what they tell."""
    manage, http = f"127.0.0.1:{free_port()}", f"{tmp_path}/http.sock"
    settings = {"manage_listen": manage, "http_listen": f"unix:{http}", **settings}
    async with (
        run_tokenizer_service(model_dir, tmp_path, **settings) as service,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(http)) as api,
        aiohttp.ClientSession() as probe,
    ):
        # Its ports are open.
        await service.until_health_is(NOT_SERVING)

        async def ask(door: str) -> bool:
            kind, _, rest = door.partition(" ")
            if kind == "grpc.health":
                check = health_pb2.HealthCheckRequest(service=rest)
                answer = await health_pb2_grpc.HealthStub(service.channel).Check(check)
                return bool(answer.status == SERVING)
            path, _, of = rest.partition(" ")
            session, host = (probe, manage) if of else (api, "localhost")
            async with session.get(f"http://{host}{path}") as response:
                assert response.status in (200, 503)
                return response.status == 200

        async def ask_all() -> dict[str, set[bool]]:
            said: dict[str, set[bool]] = {}
            for door, told in DOORS.items():
                said.setdefault(told, set()).add(await ask(door))
            return said

        yield service, ask_all


async def no_scheduler(service: Service) -> None:
    await service.link()
    await service.peer_servers[0].stop(grace=0)
    await service.until_health_is(NOT_SERVING)


async def scheduler_without_ranks(service: Service) -> None:
    await service.link()
    service.peer.holds_workers = False
    await service.until_health_is(NOT_SERVING)


async def ranks_take_no_work(service: Service) -> None:
    await service.link()
    service.peer.takes_work = False
    await service.until_health_is(NOT_SERVING)


async def ranks_take_work_again(service: Service) -> None:
    await ranks_take_no_work(service)
    service.peer.takes_work = True
    await service.until_health_is(SERVING)


async def older_scheduler(service: Service) -> None:
    service.peer.takes_work = None
    await service.link()


async def older_scheduler_without_ranks(service: Service) -> None:
    await older_scheduler(service)
    service.peer.holds_workers = False
    await service.until_health_is(NOT_SERVING)


async def replace_scheduler(service: Service, number: int) -> None:
    """The scheduler dies, and the next one is linked."""
    service.peer.break_stream()
    await service.peer.ended_streams.get()
    service.peer.cell_info.scheduler_instance_id = f"next instance {number}"
    service.peer.attach()


async def trial_of_a_request(service: Service) -> object:
    """Two schedulers have died with the same request."""
    await service.link()
    call, _ = await service.begin(tokenizer_pb2.GenerateRequest(text="The fox"))
    for number in range(2):
        await replace_scheduler(service, number)
        await service.peer.submits.get()
    await service.until_health_is(NOT_SERVING)
    return call


async def trial_of_another_replica(service: Service) -> object:
    """The scheduler lets another replica try its requests first."""
    service.peer.has_trial = False
    await service.link()
    call, submit = await service.begin(tokenizer_pb2.GenerateRequest(text="The fox"))
    for number in range(2):
        await replace_scheduler(service, number)
        if not number:
            submit = await service.peer.submits.get()
    await service.until_health_is(NOT_SERVING)
    while not service.peer.is_trying:
        await service.peer.heartbeats.get()
    assert service.peer.submits.empty()
    assert submit.attempt == 2
    return call


async def trial_is_given(service: Service) -> object:
    call = await trial_of_another_replica(service)
    service.peer.has_trial = True
    submit = await service.peer.submits.get()
    assert submit.attempt == 3
    service.peer.send(Row(submit.handle, 0, [5]))
    await service.until_health_is(SERVING)
    while service.peer.is_trying:
        await service.peer.heartbeats.get()
    return call


async def next_scheduler_without_ranks(service: Service) -> None:
    await no_scheduler(service)
    while not service.peers[1].num_streams:
        await service.peers[1].heartbeats.get()


async def ranks_are_back(service: Service) -> None:
    await scheduler_without_ranks(service)
    service.peer.holds_workers = True
    await service.until_health_is(SERVING)


async def loading(service: Service) -> None:
    await service.peer.heartbeats.get()


async def draining(service: Service) -> object:
    await service.link()
    call, _ = await service.begin(tokenizer_pb2.GenerateRequest(text="The fox"))
    service.stop.set()
    await service.until_health_is(NOT_SERVING)
    return call


# A state, and whether a request is computed now; whether clients are sent here during the bridging time, and after it.
STATES: dict[str, tuple[Callable[[Service], Awaitable[object]], bool, bool, bool]] = {
    "linked": (Service.link, True, True, True),
    "no scheduler": (no_scheduler, False, True, False),
    "scheduler without ranks": (scheduler_without_ranks, False, True, False),
    "ranks take no work": (ranks_take_no_work, False, True, False),
    "ranks take work again": (ranks_take_work_again, True, True, True),
    "older scheduler": (older_scheduler, True, True, True),
    "older scheduler without ranks": (older_scheduler_without_ranks, False, True, False),
    "trial of a request": (trial_of_a_request, False, True, False),
    "trial of another replica": (trial_of_another_replica, False, True, False),
    "trial is given": (trial_is_given, True, True, True),
    "next scheduler without ranks": (next_scheduler_without_ranks, False, True, False),
    "ranks are back": (ranks_are_back, True, True, True),
    "loading": (loading, False, False, False),
    "draining": (draining, False, False, False),
}


@pytest.mark.parametrize("bridging_s", [LONG_S, NONE_S])
@pytest.mark.parametrize("state", STATES)
async def test_health_is_what_would_be_computed_and_readiness_bridges_a_restart(
    model_dir: Path, tmp_path: Path, state: str, bridging_s: float
) -> None:
    reach, is_computed, is_bridged, is_ready_after = STATES[state]
    is_ready = is_bridged if bridging_s else is_ready_after
    async with doors(model_dir, tmp_path, num_schedulers=2, bridging_s=bridging_s) as (service, ask_all):
        # What it returns lives as long as the state.
        _call = await reach(service)
        if not is_ready:
            await service.until_health_is(NOT_SERVING, service=TOKENIZER_SERVICE)
        assert await ask_all() == {HEALTH: {is_computed}, READY: {is_ready}, PROCESS: {True}}


async def test_readiness_ends_with_the_bridging_time_and_comes_back_with_the_workers() -> None:
    moments = [(1, "lost"), (2, ""), (3, ""), (4, "lost"), (12, "lost"), (13, "lost"), (14, ""), (15, "lost")]
    moment = moments[0]
    health, probes = Health(("service",)), Probes("starting")
    probes.set_started()
    readiness = Readiness(
        health, probes, why_not_computed=lambda: moment[1] or None, bridging_s=lambda: 10.0, now=lambda: moment[0]
    )
    told = []
    for moment in moments:  # noqa: B007 - the readiness looks at it
        await readiness.update()
        told.append((health.is_serving, probes.why_not_ready))
    await readiness.leave()
    assert told == [
        (False, "lost"),
        (True, None),
        (True, None),
        (False, None),
        (False, None),
        (False, "lost"),
        (True, None),
        (False, None),
    ]
    assert (health.is_serving, probes.why_not_ready) == (False, "leaving")


@pytest.mark.parametrize(
    ("setting_s", "start_s", "expected_s"),
    [(None, None, 60.0), (None, 2.0, 10.0), (None, 90.0, 180.0), (3.0, 90.0, 3.0), (0.0, None, 0.0)],
)
def test_the_bridging_time_is_the_setting_or_follows_the_last_start_of_the_workers(
    setting_s: float | None, start_s: float | None, expected_s: float
) -> None:
    assert find_bridging_s(setting_s, start_s) == expected_s


async def test_the_cell_tells_how_long_its_workers_took_to_start(model_dir: Path, tmp_path: Path) -> None:
    async with doors(model_dir, tmp_path) as (service, ask_all):
        service.peer.cell_info.worker_start_time.FromSeconds(1000)
        await scheduler_without_ranks(service)
        assert (await ask_all())[READY] == {True}
