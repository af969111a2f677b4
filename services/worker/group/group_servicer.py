"""GroupService: the leader's end of the links inside its failure domain, and the relay of its group's steps."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.worker.group.link import Link, LinkEnd, checksum, parse_layout
from services.worker.layout import RankLayout
from services.worker.process.exits import DomainEnd, ExitCode
from services.worker.step import StepOutput
from shared.errors import GroupMismatchError, InternalError

if TYPE_CHECKING:
    from services.worker.runner.model_runner import ModelRunner

_GOODBYE = worker_pb2.JoinResponse(leave=worker_pb2.Leave())


class Follower:
    """A process that joined: a member of the group, or the leader of a coupled one."""

    def __init__(self, hello: worker_pb2.Hello, link: Link[worker_pb2.JoinResponse]) -> None:
        self.layout = parse_layout(hello.layout)
        self.numerics_fingerprint: str = hello.numerics_fingerprint
        self.link = link
        self._attached: asyncio.Queue[worker_pb2.MemberAttached] = asyncio.Queue()
        self._dones: asyncio.Queue[worker_pb2.Done] = asyncio.Queue()

    async def read(self, requests: AsyncIterator[worker_pb2.JoinRequest]) -> bool:
        """Take what comes until nothing more does; whether the process was asked to end."""
        async for request in requests:
            self.link.hear()
            kind = request.WhichOneof("message")
            if kind == "leave":
                return True
            if kind == "attached":
                self._attached.put_nowait(request.attached)
            elif kind == "done":
                self._dones.put_nowait(request.done)
            else:
                assert kind == "heartbeat", "a process that has joined says who it is once"
        return False

    async def num_blocks(self, epoch: int) -> int:
        """The KV blocks that it has for an epoch, once it holds the empty batch."""
        while (attached := await self._attached.get()).epoch < epoch:
            pass
        assert attached.epoch == epoch, "a member is ahead of its leader"
        return int(attached.num_blocks)

    async def checksum(self, epoch: int, step_id: int) -> int:
        """What it drew in a step, once it has run it; steps before that nobody asked for are skipped."""
        while ((done := await self._dones.get()).epoch, done.step_id) < (epoch, step_id):
            pass
        assert (done.epoch, done.step_id) == (epoch, step_id), "a member is ahead of its leader"
        return int(done.checksum)


class GroupServicer(worker_pb2_grpc.GroupServiceServicer):
    """Takes in those that follow this leader, and relays what it launches to the members of its group.

    Invariant: what a member is sent, it is sent in the order in which the leader launches it.
    """

    def __init__(self, layout: RankLayout, domain_start_id: str, end: DomainEnd, silence_s: float) -> None:
        """Lead those that follow `layout`; a partner that is silent for `silence_s` is lost."""
        self._layout = layout
        self._domain_start_id = domain_start_id
        self._end = end
        self._silence_s = silence_s
        self._runner: ModelRunner | None = None
        self._is_loaded = asyncio.Event()
        self._followers: dict[RankLayout, Follower] = {}
        self._is_complete = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve `GroupService` on `server`."""
        worker_pb2_grpc.add_GroupServiceServicer_to_server(self, server)

    async def open(self, runner: ModelRunner) -> None:
        """The weights are loaded: take in those that join; returns when all have."""
        self._runner = runner
        self._is_loaded.set()
        if self._layout.followers():
            await self._is_complete.wait()

    async def Join(self, requests: AsyncIterator[worker_pb2.JoinRequest], context: grpc.aio.ServicerContext) -> None:
        """See worker.proto."""
        first = await anext(aiter(requests), worker_pb2.JoinRequest())
        await self._is_loaded.wait()
        follower = self._take_in(first.hello)
        # The first heartbeat tells it that it belongs to the domain from here on.
        ended = await follower.link.run(context.write, follower.read(requests), self._end.stopping)
        if ended is LinkEnd.LEFT:
            self._end.stop("a partner was asked to end", partner=follower.layout)
        elif ended is not LinkEnd.CLOSED:
            self._end.fail(ExitCode.LINK_LOST, f"the link of a partner is {ended.value}", partner=follower.layout)

    def relay_attach(self, request: worker_pb2.AttachRequest) -> list[asyncio.Task[int]]:
        """Begin an epoch on the members; each answers with its KV blocks."""
        for member in self._members:
            member.link.send(worker_pb2.JoinResponse(attach=request))
        return [asyncio.create_task(member.num_blocks(request.epoch)) for member in self._members]

    def relay_step(self, request: worker_pb2.StepRequest) -> None:
        """Send a step to the members, which the leader launches next."""
        if members := self._members:
            message = worker_pb2.JoinResponse(step=request.SerializeToString())
            for member in members:
                member.link.send(message)

    async def agree(self, output: StepOutput) -> None:
        """Return when every member has drawn what the leader has; else the process ends.

        Raises:
            InternalError: it ends.
        """
        own = checksum(output)
        for member in self._members:
            theirs = await member.checksum(output.epoch, output.step_id)
            if theirs != own:
                self._end.fail(
                    ExitCode.RANKS_DIFFER,
                    "ranks of the group drew different tokens",
                    step_id=output.step_id,
                    own_checksum=own,
                    tp_rank=member.layout.tp_rank,
                    checksum=theirs,
                )
                raise InternalError("the group's ranks disagree")

    def fingerprint(self, own: str) -> str:
        """The numerics of the whole group: its members' common one, or one of them all in rank order."""
        parts = [own, *(member.numerics_fingerprint for member in self._members)]
        return own if len(set(parts)) == 1 else hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    @property
    def _members(self) -> list[Follower]:
        """The other processes of the group, in rank order."""
        members = [follower for follower in self._followers.values() if follower.layout.tp_rank]
        return sorted(members, key=lambda member: member.layout.tp_rank)

    def _take_in(self, hello: worker_pb2.Hello) -> Follower:
        """Add a process to the domain.

        Raises:
            GroupMismatchError: it does not belong to it.
        """
        assert self._runner is not None
        follower = Follower(hello, Link(self._make_heartbeat, _GOODBYE, self._silence_s))
        if hello.domain_start_id != self._domain_start_id:
            raise GroupMismatchError("another start of the domain", domain_start_id=self._domain_start_id)
        if follower.layout not in self._layout.followers() or follower.layout in self._followers:
            raise GroupMismatchError("no place for this process", leader=self._layout)
        if hello.model_digest != self._runner.facts.model_digest:
            raise GroupMismatchError("another model", model_digest=self._runner.facts.model_digest)
        self._followers[follower.layout] = follower
        if self._followers.keys() == self._layout.followers():
            self._is_complete.set()
        return follower

    def _make_heartbeat(self) -> worker_pb2.JoinResponse:
        assert self._runner is not None
        return worker_pb2.JoinResponse(heartbeat=worker_pb2.Heartbeat(progress=self._runner.progress))
