"""GroupService: the leader's end of the links inside its failure domain.

A step on its way through a TP group; heartbeats flow both ways on every Join stream:

    scheduler ── Execute: StepRequest ──► leader ── Join: the same bytes ──► members (tp_rank 1, 2, …)
                                            │                                  │
                                        computes ◄────── collectives ──────► compute
                                            │                                  │
    scheduler ◄── Execute: StepResult ── agree  ◄──── Join: Done, checksum ────┘

The leaders of other coupled groups join the leader of DP rank 0 too, but take their steps from the scheduler.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.worker.group.link import Link, LinkEnd, checksum, parse_layout
from services.worker.layout import RankLayout
from services.worker.parallel.rendezvous import Rendezvous
from services.worker.process.exits import DomainEnd, ExitCode
from services.worker.runner.cache_room import CacheRoom
from shared.errors import GroupMismatchError, InternalError
from shared.release import find_release
from shared.step.step import StepResult

if TYPE_CHECKING:
    from services.worker.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_GOODBYE = worker_pb2.JoinResponse(leave=worker_pb2.Leave())


class Follower:
    """A member of the group, or the leader of another coupled group."""

    def __init__(self, hello: worker_pb2.Hello, link: Link[worker_pb2.JoinResponse], end: DomainEnd) -> None:
        self._end = end
        self.layout = parse_layout(hello.layout)
        self.numerics_fingerprint: str = hello.numerics_fingerprint
        self.link = link
        self._attached: asyncio.Queue[worker_pb2.MemberAttached] = asyncio.Queue()
        self._dones: asyncio.Queue[worker_pb2.Done] = asyncio.Queue()

    async def read(self, requests: AsyncIterator[worker_pb2.JoinRequest]) -> bool:
        """Handle messages until the stream ends; whether the process said goodbye."""
        async for request in requests:
            self.link.note_alive()
            kind = request.WhichOneof("message")
            if kind == "leave":
                return True
            if kind == "attached":
                self._attached.put_nowait(request.attached)
            elif kind == "done":
                self._dones.put_nowait(request.done)
            else:
                assert kind == "heartbeat", "a joined process sent a second hello"
                if request.heartbeat.is_leaving:
                    self._end.leave("a follower is leaving", partner=self.layout)
        return False

    async def room(self, epoch: int) -> CacheRoom:
        """What it has room for in an epoch, once it holds the empty batch."""
        while (attached := await self._attached.get()).epoch < epoch:
            pass
        assert attached.epoch == epoch, "a member is ahead of its leader"
        return CacheRoom(attached.num_blocks, attached.max_num_seqs, attached.num_checkpoint_slots)

    async def checksum(self, epoch: int, step_id: int) -> int:
        """Checksum of the tokens it drew in a step, once it has run it; skips earlier steps."""
        while ((done := await self._dones.get()).epoch, done.step_id) < (epoch, step_id):
            pass
        assert (done.epoch, done.step_id) == (epoch, step_id), "a member is ahead of its leader"
        return int(done.checksum)


class GroupServicer(worker_pb2_grpc.GroupServiceServicer):
    """Accepts this leader's followers, and relays epochs and steps to its group's members, in the order it launches
    them.
    """

    def __init__(self, layout: RankLayout, end: DomainEnd, silence_s: float) -> None:
        self._layout = layout
        self._release = find_release()
        self._rendezvous: Rendezvous | None = None
        self._is_begun = asyncio.Event()
        self._met: set[RankLayout] = set()
        self._end = end
        self._silence_s = silence_s
        self._runner: ModelRunner | None = None
        self._is_loaded = asyncio.Event()
        self._followers: dict[RankLayout, Follower] = {}
        # Those that compute the leader's own steps, in rank order.
        self._members: list[Follower] = []
        self._is_complete = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve `GroupService` on `server`."""
        worker_pb2_grpc.add_GroupServiceServicer_to_server(self, server)

    def tell(self, rendezvous: Rendezvous) -> None:
        """Answer the followers that ask: the domain's start has begun."""
        self._rendezvous = rendezvous
        self._is_begun.set()
        logger.info("the domain's start has begun", extra={"start_id": rendezvous.start_id, "store": rendezvous.store})

    async def wait_until_begun(self) -> Rendezvous:
        """Wait for `tell`; returns what was told."""
        await self._is_begun.wait()
        assert self._rendezvous is not None
        return self._rendezvous

    async def open(self, runner: ModelRunner) -> None:
        """Accept the followers, once the weights are loaded; returns when all have joined."""
        self._runner = runner
        self._is_loaded.set()
        if self._layout.followers():
            await self._is_complete.wait()

    async def Meet(self, request: worker_pb2.MeetRequest, context: grpc.aio.ServicerContext) -> None:
        """See worker.proto."""
        layout = parse_layout(request.layout)
        self._check_belongs(layout, request.release)
        if layout in self._met:
            raise GroupMismatchError("the process's rank is already taken", leader=self._layout)
        self._met.add(layout)
        is_told = False
        try:
            start = await self.wait_until_begun()
            await context.write(worker_pb2.MeetResponse(domain_start_id=start.start_id, store=start.store))
            is_told = True
            # Until the call is cancelled.
            await asyncio.Event().wait()
        finally:
            self._met.remove(layout)
            if is_told and layout not in self._followers and not self._end.stopping.is_set():
                self._end.fail(ExitCode.LINK_LOST, "a follower was lost before it had joined", partner=layout)

    async def Join(self, requests: AsyncIterator[worker_pb2.JoinRequest], context: grpc.aio.ServicerContext) -> None:
        """See worker.proto."""
        hello = (await anext(aiter(requests), worker_pb2.JoinRequest())).hello
        if self._rendezvous is None or hello.domain_start_id != self._rendezvous.start_id:
            raise GroupMismatchError("the process belongs to another start of the domain")
        self._check_belongs(parse_layout(hello.layout), hello.release)
        await self._is_loaded.wait()
        follower = self._take_in(hello)
        # The first heartbeat tells the follower that it was accepted.
        reading = follower.read(requests)
        ended = await follower.link.run(context.write, reading, self._end.leaving, self._end.stopping)
        if ended is LinkEnd.LEFT:
            self._end.stop("a follower was asked to end", partner=follower.layout)
        elif ended is not LinkEnd.CLOSED:
            self._end.fail(ExitCode.LINK_LOST, f"the link to a follower is {ended.value}", partner=follower.layout)

    def relay_attach(self, request: worker_pb2.AttachRequest) -> list[asyncio.Task[CacheRoom]]:
        """Begin an epoch on the members; the tasks return what they have room for."""
        for member in self._members:
            member.link.send(worker_pb2.JoinResponse(attach=request))
        return [asyncio.create_task(member.room(request.epoch)) for member in self._members]

    def relay_step(self, request: worker_pb2.StepRequest) -> None:
        """Send members the leader's next step."""
        if self._members:
            message = worker_pb2.JoinResponse(step=request.SerializeToString())
            for member in self._members:
                member.link.send(message)

    async def agree(self, output: StepResult) -> None:
        """Return when every member has drawn the leader's tokens.

        Raises:
            InternalError: the tokens differ, and the process is ending.
        """
        if not self._members:
            return
        own = checksum(output)
        for member in self._members:
            theirs = await member.checksum(output.epoch, output.step_id)
            if theirs != own:
                self._end.fail(
                    ExitCode.RANKS_DIFFER,
                    "the group's ranks drew different tokens",
                    step_id=output.step_id,
                    own_checksum=own,
                    tp_rank=member.layout.tp_rank,
                    checksum=theirs,
                )
                raise InternalError("the group's ranks drew different tokens")

    def fingerprint(self, own: str) -> str:
        """The group's common numerics fingerprint, or a hash of all in rank order."""
        parts = [own, *(member.numerics_fingerprint for member in self._members)]
        return own if len(set(parts)) == 1 else hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    def _check_belongs(self, layout: RankLayout, release: str) -> None:
        """Check that a process has a place in this domain.

        Raises:
            GroupMismatchError: it has none, it is already there, or it is of another release.
        """
        if layout not in self._layout.followers() or layout in self._followers:
            raise GroupMismatchError("the process's rank is unknown or already taken", leader=self._layout)
        if release != self._release:
            raise GroupMismatchError(
                f"the process is of release {release or 'unknown'}, its leader of {self._release}",
                release=release,
                leaders_release=self._release,
            )

    def _take_in(self, hello: worker_pb2.Hello) -> Follower:
        """Add a process.

        Raises:
            GroupMismatchError: its rank is taken, or it has loaded another model.
        """
        assert self._runner is not None
        follower = Follower(hello, Link(self._make_heartbeat, _GOODBYE, self._silence_s), self._end)
        if follower.layout in self._followers:
            raise GroupMismatchError("the process's rank is already taken", leader=self._layout)
        if hello.model_digest != self._runner.facts.model_digest:
            raise GroupMismatchError(
                "the process has loaded another model", model_digest=self._runner.facts.model_digest
            )
        self._followers[follower.layout] = follower
        if follower.layout.tp_rank:
            self._members = sorted([*self._members, follower], key=lambda member: member.layout.tp_rank)
        if self._followers.keys() == self._layout.followers():
            self._is_complete.set()
        return follower

    def _make_heartbeat(self) -> worker_pb2.JoinResponse:
        assert self._runner is not None
        heartbeat = worker_pb2.Heartbeat(progress=self._runner.progress, is_leaving=self._end.leaving.is_set())
        return worker_pb2.JoinResponse(heartbeat=heartbeat)
