"""A follower's end of the link to its leader."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.worker.group.link import Link, LinkEnd, to_layout_message
from services.worker.group.meeting import Connect, Meeting, Retries, is_gone, meet
from services.worker.parallel.rendezvous import Rendezvous
from services.worker.process.exits import DomainEnd, ExitCode
from shared.network.rpc import make_channel, make_peer
from shared.network.tls import Role
from shared.release import find_release

if TYPE_CHECKING:
    from services.worker.config import WorkerSettings
    from services.worker.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_LOST = "the leader was lost before this process had joined"
_GOODBYE = worker_pb2.JoinRequest(leave=worker_pb2.Leave())


class Relay(Protocol):
    """Handles what a leader sends to its group's members."""

    def take(self, message: worker_pb2.JoinResponse) -> None:
        """Handle an epoch or a step, never a heartbeat. Called on the RPC thread's event loop."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What a process has that may join."""

    hello: worker_pb2.Hello
    link: Link[worker_pb2.JoinRequest]
    relay: Relay | None


class JoinedLink:
    """Meets a leader, then joins it; ends this process when the leader refuses it, is lost, or says goodbye."""

    def __init__(self, settings: WorkerSettings, end: DomainEnd, connect: Connect | None = None) -> None:
        """`connect` opens a channel to the leader; None means over the network."""
        assert settings.leader is not None, "there is no leader to join"
        self._settings = settings
        self._leader = settings.leader
        self._layout = to_layout_message(settings.layout)
        self._release = find_release()
        self._end = end
        peer = make_peer(settings.certificates, Role.WORKER)
        self._connect = connect or partial(make_channel, settings.leader, internal=True, peer=peer)
        self._met: asyncio.Queue[worker_pb2.MeetResponse] = asyncio.Queue()
        self._loaded: asyncio.Queue[_Loaded] = asyncio.Queue()
        self._joined = asyncio.Event()
        self._domain_start_id = ""
        self._task: asyncio.Task[None] | None = None
        self._link: Link[worker_pb2.JoinRequest] | None = None

    def send(self, message: worker_pb2.JoinRequest) -> None:
        """Send to the leader. Only after `open`."""
        assert self._link is not None
        self._link.send(message)

    async def meet(self) -> Rendezvous:
        """Ask the leader where the ranks of this start of the domain connect to each other; returns its answer.

        Raises:
            NotMetError: it did not answer in time.
        """
        self._task = asyncio.create_task(self._run())
        answering = asyncio.ensure_future(self._met.get())
        await asyncio.wait({answering, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        answer = await answering
        self._domain_start_id = answer.domain_start_id
        logger.info("met the leader", extra={"leader": self._leader, "start_id": self._domain_start_id})
        return Rendezvous(answer.domain_start_id, answer.store, collective_host=self._settings.collective_host)

    async def open(self, runner: ModelRunner, relay: Relay | None = None) -> None:
        """Join, once the weights are loaded; returns when the leader has accepted this process. After `meet`.

        `relay` is None in a leader, which receives no epochs and steps.
        """
        hello = worker_pb2.Hello(
            layout=self._layout,
            domain_start_id=self._domain_start_id,
            model_digest=runner.facts.model_digest,
            numerics_fingerprint=runner.numerics_fingerprint,
            release=self._release,
        )
        self._link = Link(lambda: self._make_heartbeat(runner), _GOODBYE, self._settings.silence_s)
        self._loaded.put_nowait(_Loaded(hello, self._link, relay))
        await self._joined.wait()

    async def close(self) -> None:
        """Wait for the link to end, with a goodbye if this process was asked to end."""
        if self._task is not None:
            if not self._joined.is_set():
                self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        request = worker_pb2.MeetRequest(layout=self._layout, release=self._release)
        retries = Retries(f"meet the leader {self._leader}", self._settings.meet_timeout_s)
        try:
            async with meet(self._connect, request, retries) as meeting:
                self._met.put_nowait(meeting.answer)
                await self._join(meeting)
        except grpc.aio.AioRpcError as error:
            if is_gone(error):
                self._end.fail(ExitCode.LINK_LOST, _LOST, leader=self._leader)
            else:
                self._end.fail(ExitCode.REFUSED, "the leader refused this process", error=error.details())

    async def _join(self, meeting: Meeting) -> None:
        """Join once this process has loaded, and stay until the link ends.

        Raises:
            AioRpcError: the leader refuses the process.
        """
        watching = asyncio.create_task(self._watch(meeting))
        try:
            loaded = await self._loaded.get()
            call = worker_pb2_grpc.GroupServiceStub(meeting.channel).Join()
            await call.write(worker_pb2.JoinRequest(hello=loaded.hello))
            # The leader sends a heartbeat when it accepts. Headers prove nothing: a refusal may have them too.
            first = await call.read()
        finally:
            watching.cancel()
        self._joined.set()
        meeting.call.cancel()
        reading = self._read(call, first, loaded.link, loaded.relay)
        ended = await loaded.link.run(call.write, reading, self._end.leaving, self._end.stopping)
        if ended is LinkEnd.LEFT:
            self._end.stop("the leader was asked to end", leader=self._leader)
        elif ended is not LinkEnd.CLOSED:
            self._end.fail(ExitCode.LINK_LOST, f"the link to the leader is {ended.value}", leader=self._leader)

    async def _watch(self, meeting: Meeting) -> None:
        """End this process when the leader is lost: it may be waiting for it in a collective."""
        await meeting.wait_until_lost()
        self._end.fail(ExitCode.LINK_LOST, _LOST, leader=self._leader)

    async def _read(self, call: Any, first: Any, link: Link[worker_pb2.JoinRequest], relay: Relay | None) -> bool:
        """Whether the leader said goodbye when the stream ended; `first` is the first message."""
        message = first
        while message is not grpc.aio.EOF:
            link.note_alive()
            if message.HasField("leave"):
                return True
            if not message.HasField("heartbeat"):
                assert relay is not None, "a coupled leader received a step from its leader"
                relay.take(message)
            elif message.heartbeat.is_leaving:
                self._end.leave("the leader is leaving", leader=self._leader)
            message = await call.read()
        return False

    def _make_heartbeat(self, runner: ModelRunner) -> worker_pb2.JoinRequest:
        heartbeat = worker_pb2.Heartbeat(progress=runner.progress, is_leaving=self._end.leaving.is_set())
        return worker_pb2.JoinRequest(heartbeat=heartbeat)
