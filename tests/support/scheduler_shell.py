"""A scheduler in this process, served over real gRPC, with a worker peer at its other side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from lockstep.internal.v1 import exchange_pb2_grpc
from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.config import SchedulerSettings
from services.scheduler.server import CellServer
from services.scheduler.servicer import ExchangeServicer, SchedulerAdminServicer, SchedulerServicer
from shared.health import Health
from shared.rpc import Servicer, make_channel, make_server
from tests.support.worker_peer import WorkerPeer


@dataclass
class Cell:
    """A scheduler in this process, its worker, and a channel to it."""

    worker: WorkerPeer
    server: CellServer
    channel: grpc.aio.Channel

    @property
    def scheduler(self) -> Any:
        """A stub of SchedulerService."""
        return scheduler_pb2_grpc.SchedulerServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        """A stub of SchedulerAdminService."""
        return scheduler_pb2_grpc.SchedulerAdminServiceStub(self.channel)

    def exchange(self) -> grpc.aio.StreamStreamCall:
        """A new stream, as a replica opens it."""
        return exchange_pb2_grpc.ExchangeServiceStub(self.channel).Exchange()

    async def state(self) -> scheduler_pb2.GetStateResponse:
        """The cell's state."""
        state: scheduler_pb2.GetStateResponse = await self.scheduler.GetState(scheduler_pb2.GetStateRequest())
        return state

    async def wait_until(self, condition: Callable[[scheduler_pb2.GetStateResponse], object]) -> None:
        """Wait until the cell's state is as wanted; fails after a minute."""
        async with asyncio.timeout(60):
            while not condition(await self.state()):
                pass

    async def wait_until_ready(self) -> None:
        """Wait until the worker is attached; fails after a minute."""
        await self.wait_until(lambda state: state.ready)

    async def wait_until_free(self) -> None:
        """Wait until no request waits and no block is used; fails after a minute."""
        await self.wait_until(lambda state: not (state.num_used_blocks or state.num_waiting))


@asynccontextmanager
async def running_cell(tmp_path: Path, worker: WorkerPeer | None = None, **settings: Any) -> AsyncIterator[Cell]:
    """A scheduler whose worker is `worker`, or a new one; its sockets are in `tmp_path`, `settings` are more of its."""
    worker = worker or WorkerPeer()
    worker_server = make_server(f"unix:{tmp_path}/worker", [worker], internal=True)
    await worker_server.start()
    address = f"unix:{tmp_path}/scheduler"
    scheduler_settings = SchedulerSettings(listen=address, worker=f"unix:{tmp_path}/worker", **settings)
    health = Health(())
    cell = CellServer(scheduler_settings, "instance", health)
    servicers: list[Servicer] = [
        ExchangeServicer(cell),
        SchedulerServicer(cell, scheduler_settings.max_unread_s),
        SchedulerAdminServicer(cell),
        health,
    ]
    server = make_server(address, servicers, internal=True)
    await server.start()
    link = asyncio.create_task(cell.run_worker_link())
    async with make_channel(address, internal=True) as channel:
        yield Cell(worker, cell, channel)
    link.cancel()
    await asyncio.gather(link, return_exceptions=True)
    await server.stop(0)
    await worker_server.stop(0)
