"""A scheduler in this process, served over real gRPC, with a worker peer at its other side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from lockstep.internal.v1 import exchange_pb2_grpc
from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.config import SchedulerSettings
from services.scheduler.server import CellServer
from services.scheduler.servicer import ExchangeServicer, SchedulerServicer
from shared.health import Health
from shared.rpc import make_channel, make_server
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

    def exchange(self) -> grpc.aio.StreamStreamCall:
        """A new stream, as a replica opens it."""
        return exchange_pb2_grpc.ExchangeServiceStub(self.channel).Exchange()

    async def state(self) -> scheduler_pb2.GetStateResponse:
        """The cell's state."""
        state: scheduler_pb2.GetStateResponse = await self.scheduler.GetState(scheduler_pb2.GetStateRequest())
        return state

    async def wait_until_ready(self) -> None:
        """Wait until the worker is attached; fails after a minute."""
        async with asyncio.timeout(60):
            while not (await self.state()).ready:
                pass

    async def wait_until_free(self) -> None:
        """Wait until no request waits and no block is used; fails after a minute."""
        async with asyncio.timeout(60):
            while (state := await self.state()).num_used_blocks or state.num_waiting:
                pass


@asynccontextmanager
async def running_cell(tmp_path: Path, worker: WorkerPeer | None = None) -> AsyncIterator[Cell]:
    """A scheduler whose worker is `worker`, or a new one; its sockets are in `tmp_path`."""
    worker = worker or WorkerPeer()
    worker_server = make_server(f"unix:{tmp_path}/worker", [worker], internal=True)
    await worker_server.start()
    settings = SchedulerSettings(listen=f"unix:{tmp_path}/scheduler", worker=f"unix:{tmp_path}/worker")
    health = Health(())
    cell = CellServer(settings, "instance", health)
    server = make_server(settings.listen, [ExchangeServicer(cell), SchedulerServicer(cell), health], internal=True)
    await server.start()
    link = asyncio.create_task(cell.run_worker_link())
    async with make_channel(settings.listen, internal=True) as channel:
        yield Cell(worker, cell, channel)
    link.cancel()
    await asyncio.gather(link, return_exceptions=True)
    await server.stop(0)
    await worker_server.stop(0)
