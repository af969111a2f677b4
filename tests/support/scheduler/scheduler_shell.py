"""A scheduler in this process, served over real gRPC, with worker peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from lockstep.internal.v1 import exchange_pb2, exchange_pb2_grpc
from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.config import SchedulerSettings
from services.scheduler.discovery.last_seen import LastSeen
from services.scheduler.make_cell import make_cell
from services.scheduler.server.cell_server import CellServer
from services.scheduler.server.listeners import PUBLIC_SERVICES, make_servers
from shared.network.health import Health
from shared.network.rpc import make_channel, make_server
from tests.support.scheduler.worker_peer import WorkerPeer
from tests.support.system.polling import poll_until

# Most of what is waited for takes a few turns of the event loop, in which services and tests run.
NUM_EAGER_QUESTIONS = 100


class ReplicaStream:
    """A replica's stream without heartbeats: it sends none, and only counts those it receives.

    Attributes:
        load: What the last one said.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self._call = call
        self.num_heartbeats = 0
        self.load = exchange_pb2.CellLoad()

    async def read(self) -> exchange_pb2.ExchangeResponse:
        """The next response that is not a heartbeat; raises the error with which the call ends."""
        while (response := await self._call.read()) is not grpc.aio.EOF:
            if not response.HasField("heartbeat"):
                break
            self.num_heartbeats += 1
            self.load = response.heartbeat.load
        message: exchange_pb2.ExchangeResponse = response
        return message

    async def read_heartbeat(self) -> exchange_pb2.SchedulerHeartbeat:
        """The next heartbeat; other responses before it are dropped."""
        while not (response := await self._call.read()).HasField("heartbeat"):
            pass
        heartbeat: exchange_pb2.SchedulerHeartbeat = response.heartbeat
        return heartbeat

    async def write(self, request: exchange_pb2.ExchangeRequest) -> None:
        """Send a request."""
        await self._call.write(request)

    def cancel(self) -> None:
        """Break the stream."""
        self._call.cancel()


@dataclass
class Cell:
    """A scheduler in this process, its workers by DP rank, its links to them, and a channel to each listener."""

    workers: list[WorkerPeer]
    server: CellServer
    links: asyncio.Task[None]
    channel: grpc.aio.Channel
    cell_channel: grpc.aio.Channel

    @property
    def worker(self) -> WorkerPeer:
        """The worker of DP rank 0."""
        return self.workers[0]

    @property
    def scheduler(self) -> Any:
        """A stub of SchedulerService."""
        return scheduler_pb2_grpc.SchedulerServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        """A stub of SchedulerAdminService."""
        return scheduler_pb2_grpc.SchedulerAdminServiceStub(self.cell_channel)

    def exchange(self) -> ReplicaStream:
        """Open a new stream, as a replica does."""
        return ReplicaStream(exchange_pb2_grpc.ExchangeServiceStub(self.cell_channel).Exchange())

    async def state(self) -> scheduler_pb2.GetStateResponse:
        """The cell's state."""
        operator: Any = scheduler_pb2_grpc.SchedulerServiceStub(self.cell_channel)
        state: scheduler_pb2.GetStateResponse = await operator.GetState(scheduler_pb2.GetStateRequest())
        return state

    async def wait_until(self, condition: Callable[[scheduler_pb2.GetStateResponse], object]) -> None:
        """Wait until the cell's state meets a condition; fails after five minutes."""
        await poll_until(self.state, condition, num_eager=NUM_EAGER_QUESTIONS)

    async def wait_until_ready(self) -> None:
        """Wait until the worker is attached; fails after five minutes."""
        await self.wait_until(lambda state: state.ready)

    async def wait_until_free(self) -> None:
        """Wait until no request is waiting and no block is in use; fails after five minutes."""
        await self.wait_until(lambda state: not (state.num_used_blocks or state.num_waiting))


@asynccontextmanager
async def running_cell(tmp_path: Path, *workers: WorkerPeer, **settings: Any) -> AsyncIterator[Cell]:
    """Run a scheduler with these settings and workers (one new `WorkerPeer` by default), on sockets in `tmp_path`."""
    workers = workers or (WorkerPeer(),)
    is_coupled = settings.get("coupled", False)
    addresses = [f"unix:{tmp_path}/worker-{rank}" for rank in range(len(workers))]
    worker_servers = [
        make_server(address, [worker], internal=True) for address, worker in zip(addresses, workers, strict=True)
    ]
    for rank, (worker, worker_server) in enumerate(zip(workers, worker_servers, strict=True)):
        worker.place(rank, len(workers), is_coupled=is_coupled)
        await worker_server.start()
    async with running_scheduler(tmp_path, list(workers), workers=tuple(addresses), **settings) as cell:
        yield cell
    for server in worker_servers:
        await server.stop(0)


@asynccontextmanager
async def running_scheduler(
    tmp_path: Path, peers: list[WorkerPeer], *, instance_id: str = "instance", **settings: Any
) -> AsyncIterator[Cell]:
    """Run a scheduler with these settings, on sockets in `tmp_path`; `peers` are what its `Cell` shows."""
    address, cell_address = f"unix:{tmp_path}/scheduler", f"unix:{tmp_path}/cell"
    scheduler_settings = SchedulerSettings(listen=address, cell_listen=cell_address, **settings)
    health = Health(PUBLIC_SERVICES)
    cell = make_cell(scheduler_settings, instance_id, health, LastSeen(0.0))
    servers = make_servers(scheduler_settings, cell, health)
    for server in servers:
        await server.start()
    links = asyncio.create_task(cell.run_worker_links())
    async with make_channel(address) as channel, make_channel(cell_address, internal=True) as cell_channel:
        yield Cell(peers, cell, links, channel, cell_channel)
    links.cancel()
    await asyncio.gather(links, return_exceptions=True)
    for server in servers:
        await server.stop(0)
