"""The processes of one failure domain, as roles within a test's process."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.worker.config import WorkerSettings
from services.worker.group.member import Member
from services.worker.models.loader import LoadedModel
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.exits import DomainEnd, ExitCode
from services.worker.process.rpc_thread import Role
from services.worker.server.leader import Leader
from shared.config import load_settings
from shared.network.rpc import make_channel, make_server
from shared.release import find_release
from tests.support.worker.worker_runner import make_runner

SECOND_OF_TWO = worker_pb2.RankLayout(dp_size=1, tp_rank=1, tp_size=2)


@dataclass
class Process:
    """A fake process: a served role, and the exit codes it would have had."""

    address: str
    role: Role
    end: DomainEnd
    ended: asyncio.Queue[tuple[ExitCode, dict[str, Any]]]
    server: grpc.aio.Server | None = None
    opening: asyncio.Task[None] | None = None


@dataclass
class Domain:
    """Starts the processes of one domain within this process."""

    device: DeviceLoop
    loaded: LoadedModel
    directory: Path
    stack: contextlib.AsyncExitStack
    leader_flags: tuple[str, ...] = ("--tp-size=2",)
    silence_s: float = 60.0
    processes: list[Process] = field(default_factory=list)

    @property
    def leader_address(self) -> str:
        """The address of the domain's first leader."""
        return f"unix:{self.directory / '0.sock'}"

    async def start(self, *flags: str, num_blocks: int = 64) -> Process:
        """Serve a process, and begin to open it; the first one is the leader."""
        process = await self.start_empty(*flags)

        async def open_role() -> None:
            await process.role.meet()
            await process.role.open(make_runner(self.loaded, num_blocks=num_blocks))

        process.opening = asyncio.create_task(open_role())
        self.stack.callback(process.opening.cancel)
        return process

    async def start_empty(self, *flags: str) -> Process:
        """Serve a process that has neither met the others nor loaded weights; the first one is the leader."""
        address = f"unix:{self.directory / f'{len(self.processes)}.sock'}"
        common = (f"--listen={address}",)
        settings = load_settings(
            WorkerSettings, ["--model-dir=/m", *common, f"--silence-s={self.silence_s}", *(flags or self.leader_flags)]
        )
        ended: asyncio.Queue[tuple[ExitCode, dict[str, Any]]] = asyncio.Queue()
        end = DomainEnd(self.device, lambda code, _, **fields: ended.put_nowait((code, fields)))
        make_role = Leader if settings.layout.is_leader else Member
        role: Role = make_role(settings, self.device, end)
        server = make_server(address, role.servicers, internal=True)
        await server.start()
        self.stack.push_async_callback(server.stop, 0)
        process = Process(address, role, end, ended, server)
        self.stack.push_async_callback(role.close)
        self.stack.callback(end.stopping.set)
        self.processes.append(process)
        return process

    async def start_member(self, **options: Any) -> Process:
        """Serve the second process of a group of two."""
        flags = ("--tp-rank=1", "--tp-size=2", f"--leader={self.leader_address}")
        return await self.start(*flags, **options)

    async def start_group(self, *, num_member_blocks: int = 64) -> tuple[Any, Process, Process]:
        """A group of two that can be claimed: its WorkerService, its leader and its member."""
        leader = await self.start()
        member = await self.start_member(num_blocks=num_member_blocks)
        await wait_until_open(leader, member)
        return await self.stub(), leader, member

    async def stub(self) -> Any:
        """The WorkerService of the domain's first leader."""
        channel = await self.stack.enter_async_context(make_channel(self.leader_address, internal=True))
        return worker_pb2_grpc.WorkerServiceStub(channel)

    async def meet_by_hand(self, **changes: Any) -> Any:
        """A Meet call of the second process of a group of two, with `changes`."""
        channel = await self.stack.enter_async_context(make_channel(self.leader_address, internal=True))
        request: dict[str, Any] = {"layout": SECOND_OF_TWO, "release": find_release()}
        return worker_pb2_grpc.GroupServiceStub(channel).Meet(worker_pb2.MeetRequest(**(request | changes)))

    async def join_by_hand(self, **changes: Any) -> Any:
        """A Join call after its hello: the second process of a group of two, with `changes`."""
        leader = self.processes[0]
        channel = await self.stack.enter_async_context(make_channel(leader.address, internal=True))
        call = worker_pb2_grpc.GroupServiceStub(channel).Join()
        hello: dict[str, Any] = {
            "layout": SECOND_OF_TWO,
            "domain_start_id": await start_id_of(leader),
            "model_digest": self.loaded.facts.model_digest,
            "numerics_fingerprint": "other",
            "release": find_release(),
        }
        await call.write(worker_pb2.JoinRequest(hello=worker_pb2.Hello(**(hello | changes))))
        return call


async def wait_until_open(*processes: Process) -> None:
    """Wait until all of them serve."""
    for process in processes:
        assert process.opening is not None
        await process.opening


async def start_id_of(leader: Process) -> str:
    """The id of the start of the domain that a leader has begun, once it has."""
    assert isinstance(leader.role, Leader)
    return (await leader.role.group.wait_until_begun()).start_id
