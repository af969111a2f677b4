"""A follower's end of the link to its leader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from services.worker.group.link import Link, LinkEnd, to_layout_message
from services.worker.process.exits import DomainEnd, ExitCode
from shared.rpc import Peer, make_channel, make_peer
from shared.tls import Role

if TYPE_CHECKING:
    from services.worker.config import WorkerSettings
    from services.worker.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_GOODBYE = worker_pb2.JoinRequest(leave=worker_pb2.Leave())

# Between attempts to connect; an attempt itself takes no longer than the other.
_RETRY_S = 0.2
_CONNECT_S = 5.0

Connect = Callable[[str], AbstractAsyncContextManager[grpc.aio.Channel]]


class Relay(Protocol):
    """Handles what a leader sends to its group's members."""

    def take(self, message: worker_pb2.JoinResponse) -> None:
        """Handle an epoch or a step, never a heartbeat. Called on the RPC thread's event loop."""


class JoinedLink:
    """Joins a leader; ends this process when the link breaks, falls silent, or the leader says goodbye."""

    def __init__(self, settings: WorkerSettings, end: DomainEnd, connect: Connect | None = None) -> None:
        """`connect` opens a channel to the leader; None means over the network."""
        assert settings.leader is not None, "there is no leader to join"
        self._leader = settings.leader
        self._layout = settings.layout
        self._domain_start_id = settings.domain_start_id
        self._silence_s = settings.silence_s
        self._end = end
        self._connect = connect or partial(_connect, make_peer(settings.certificates, Role.WORKER))
        self._joined = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._link: Link[worker_pb2.JoinRequest] | None = None

    def send(self, message: worker_pb2.JoinRequest) -> None:
        """Send to the leader. Only after `open`."""
        assert self._link is not None
        self._link.send(message)

    async def open(self, runner: ModelRunner, relay: Relay | None = None) -> None:
        """Join, once the weights are loaded; returns when the leader has accepted this process.

        `relay` is None in a leader, which receives no epochs and steps.
        """
        hello = worker_pb2.Hello(
            layout=to_layout_message(self._layout),
            domain_start_id=self._domain_start_id,
            model_digest=runner.facts.model_digest,
            numerics_fingerprint=runner.numerics_fingerprint,
        )
        self._link = Link(lambda: self._make_heartbeat(runner), _GOODBYE, self._silence_s)
        self._task = asyncio.create_task(self._run(hello, self._link, relay))
        await self._joined.wait()

    async def close(self) -> None:
        """Wait for the link to end, with a goodbye if this process was asked to end."""
        if self._task is not None:
            if not self._joined.is_set():
                self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, hello: worker_pb2.Hello, link: Link[worker_pb2.JoinRequest], relay: Relay | None) -> None:
        async with self._connect(self._leader) as channel:
            call = worker_pb2_grpc.GroupServiceStub(channel).Join()
            try:
                await call.write(worker_pb2.JoinRequest(hello=hello))
                # The leader sends a heartbeat when it accepts. Headers prove nothing: a refusal may have them too.
                first = await call.read()
            except grpc.aio.AioRpcError as error:
                self._end.fail(ExitCode.REFUSED, "the leader refused this process", error=error.details())
                return
            self._joined.set()
            reading = self._read(call, first, link, relay)
            ended = await link.run(call.write, reading, self._end.leaving, self._end.stopping)
            if ended is LinkEnd.LEFT:
                self._end.stop("the leader was asked to end", leader=self._leader)
            elif ended is not LinkEnd.CLOSED:
                self._end.fail(ExitCode.LINK_LOST, f"the link to the leader is {ended.value}", leader=self._leader)

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


@asynccontextmanager
async def _connect(peer: Peer | None, address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Open a connected channel, once the leader answers; why it does not is logged when it changes.

    Each attempt has a channel of its own, with the certificates of the day.
    """
    last_problem: str | None = None
    while True:
        async with make_channel(address, internal=True, peer=peer) as channel:
            problem = await _find_problem(channel)
            if problem is None:
                yield channel
                return
        if problem != last_problem:
            logger.warning("no connection to the leader", extra={"leader": address, "error": problem})
            last_problem = problem
        await asyncio.sleep(_RETRY_S)


async def _find_problem(channel: grpc.aio.Channel) -> str | None:
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_CONNECT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return str(error.details())
    return None
