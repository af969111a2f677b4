"""The asyncio shell around the engine: it turns messages into events and actions into messages.

It decides nothing. One event loop, no second thread: a busy Python thread beside it would cost the step path
milliseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from google.protobuf.message import Message

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2
from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import (
    Action,
    Beat,
    ClientGone,
    CloseClient,
    Deliver,
    DropDomain,
    Event,
    Exit,
    SendStep,
    TimePassed,
    WorkerHeard,
)
from services.scheduler.core.batch.step import Step
from services.scheduler.server.acceptance_log import AcceptanceLog
from services.scheduler.server.direct_clients import DIRECT_CLIENT, DirectClients
from services.scheduler.server.exchange_codec import encode_outputs
from services.scheduler.server.failpoint import SubmitFailpoint
from services.scheduler.server.idle_check import IdleCheck
from shared.errors import NotReadyError, SchedulerLostError, ServiceError
from shared.health import Health
from shared.heartbeat import Silence

logger = logging.getLogger(__name__)

# A replica that does not read for this long loses its stream: the steps never wait for it.
MAX_UNREAD_S = 5.0
# What was queued for a replica when its link was closed leaves within this time, or never.
LAST_WORDS_S = 0.5


class ClientLink:
    """One replica's stream as the shell sees it: messages to send, and in the end why there are no more.

    Attributes:
        closed: Once the link is closed, the error that the stream ends with, or None for OK.
    """

    def __init__(self, number: int, on_close: Callable[[], None], silence_s: float = math.inf) -> None:
        """Make a link in the running event loop.

        Args:
            number: The engine's number for the replica.
            on_close: Called in a turn of its own once the link is closed, whoever closed it.
            silence_s: A replica that has given signs of life and gives none for so long loses its link.
        """
        self.number = number
        self.closed: asyncio.Future[ServiceError | None] = asyncio.get_running_loop().create_future()
        self._on_close = on_close
        self._silence = Silence(silence_s)
        self._gives_signs = False
        self._outbox: asyncio.Queue[tuple[float, Message] | None] = asyncio.Queue()
        self._oldest_unread_at: float | None = None

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will be sent than what is queued."""
        return self.closed.done()

    def send(self, message: Message, now: float) -> None:
        """Queue a message; the link is closed when its reader has taken none for too long."""
        if self.is_closed:
            return
        if self._oldest_unread_at is not None and now - self._oldest_unread_at > MAX_UNREAD_S:
            logger.warning("a replica does not read", extra={"client": self.number})
            self.close(NotReadyError("the replica did not read"))
            return
        if self._oldest_unread_at is None:
            self._oldest_unread_at = now
        self._outbox.put_nowait((now, message))

    def hear(self) -> None:
        """Note a sign of life."""
        self._silence.hear()
        self._gives_signs = True

    def beat(self, progress: int, now: float) -> None:
        """Give a sign of life; the link is closed when its replica has given none for too long."""
        heartbeat = exchange_pb2.SchedulerHeartbeat(progress=progress)
        self.send(exchange_pb2.ExchangeResponse(heartbeat=heartbeat), now)
        if self._gives_signs and self._silence.beat() and not self.is_closed:
            logger.warning("a replica is silent", extra={"client": self.number})
            self.close(NotReadyError("the replica was silent"))

    def close(self, error: ServiceError | None) -> None:
        """End the stream after what is queued, if the replica takes that: with an error, or with OK."""
        if not self.is_closed:
            self.closed.set_result(error)
            self._outbox.put_nowait(None)
            # Not now: the engine's actions may be in the middle of being carried out.
            self.closed.get_loop().call_soon(self._on_close)

    async def messages(self) -> AsyncIterator[Message]:
        """What to send, in order, until the link is closed."""
        while (entry := await self._outbox.get()) is not None:
            self._oldest_unread_at, message = entry
            yield message
            if self._outbox.empty():
                self._oldest_unread_at = None


class DomainLinks(Protocol):
    """What is used of the links to a failure domain's groups; see `DomainClient`."""

    async def run(self) -> None:
        """Keep the domain attached until cancelled."""

    def send(self, rank: int, step: Step) -> None:
        """Send a step of the present epoch to one of the domain's ranks, behind those before it."""

    def beat(self, progress: int) -> None:
        """Give every group a sign of life."""

    def drop(self, epoch: int) -> None:
        """Break the links of an epoch that the engine has given up."""


LinkDomain = Callable[[int, Callable[[Event], None], Callable[[Exit], None]], DomainLinks]
"""Prepares the links to a domain, by its number; what comes of them goes to the first function, the wish to end to the
second."""


class CellServer:
    """Runs one engine: its links to replicas and to workers, and its door for direct calls.

    Once the engine, or the attach of a domain, has asked for the end, or a bug has left the engine and the world
    apart, nothing is done any more: `failed` is set.

    Attributes:
        bug: The exception that was the bug, or None while there was none.
    """

    def __init__(
        self,
        engine: Engine,
        link_domain: LinkDomain,
        *,
        instance_id: str,
        health: Health,
        replica_silence_s: float,
        failpoint: SubmitFailpoint | None = None,
    ) -> None:
        """Make a cell in the running event loop.

        Args:
            engine: What decides; nobody else tells it events.
            link_domain: Prepares the links to a failure domain of the engine's.
            instance_id: What this scheduler goes by.
            health: Told when workers are attached, and when none are any more.
            replica_silence_s: A replica that has given signs of life and gives none for so long is lost.
            failpoint: For tests of recovery: looks at every event first.
        """
        self.instance_id = instance_id
        self.engine = engine
        self.direct_clients = DirectClients(lambda: self.engine.model_limits, self.on_event, self._default_sampling)
        self.failed = asyncio.Event()
        self.bug: Exception | None = None
        self._replica_silence_s = replica_silence_s
        self._health = health
        self._clients: dict[int, ClientLink] = {}
        self._client_numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self.idle_check = IdleCheck(self.engine, self._loop)
        self._acceptance_log = AcceptanceLog(self.engine.state().counters)
        self._health_updates: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        self._failpoint = failpoint
        self._domains = [
            link_domain(domain, self.on_event, self._exit) for domain in range(engine.topology.num_domains)
        ]

    @property
    def num_clients(self) -> int:
        """Replicas that are linked."""
        return len(self._clients)

    async def run_worker_links(self) -> None:
        """Keep the workers attached until cancelled, or until a bug ends the scheduler."""
        # The first beat, which has the next ones follow.
        self.on_event(TimePassed())
        try:
            async with asyncio.TaskGroup() as tasks:
                for domain in self._domains:
                    tasks.create_task(domain.run())
        except ExceptionGroup as bugs:
            logger.exception("the scheduler ends: a bug in the links to the workers")
            self._end_after_bug(bugs)

    def close(self) -> None:
        """Tell all clients that this scheduler ends; they may bring their requests to the next one.

        After a bug replicas are told nothing: one of their requests may be what this scheduler died of, and they find
        it only among deaths that nobody explains.
        """
        error = SchedulerLostError("the scheduler ends; send the request again, with its output so far")
        self.direct_clients.close(error)
        if self.bug is None:
            for client in self._clients.values():
                client.close(error)

    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        state = self.engine.state()
        return not state.num_running and not state.num_waiting

    def connect(self) -> ClientLink:
        """Take in a replica; it is told about the cell as soon as there are workers."""
        number = next(self._client_numbers)
        client = ClientLink(number, lambda: self.disconnect(client), self._replica_silence_s)
        self._clients[number] = client
        self._send_cell_info(client)
        return client

    def disconnect(self, client: ClientLink) -> None:
        """Forget a replica whose stream ended, or ends, and its requests; nothing happens the second time."""
        if self._clients.pop(client.number, None) is not None:
            self.on_event(ClientGone(client.number))

    def on_event(self, event: Event) -> None:
        """Hand an event to the engine and do what it says; it raises nothing.

        An exception is a bug, after which the engine's state may be another one than the world's: the process ends.
        """
        if self.failed.is_set():
            return
        if self._failpoint is not None:
            self._failpoint.check(event)
        try:
            self._handle(event)
        except Exception as bug:
            logger.exception("the scheduler ends: a bug", extra={"event": type(event).__name__})
            self._end_after_bug(bug)

    def _end_after_bug(self, bug: Exception) -> None:
        self.bug = bug
        self.failed.set()

    def _handle(self, event: Event) -> None:
        now = self._loop.time()
        was_ready, was_known = self.engine.is_ready, self.engine.model is not None
        actions = self.engine.on_event(event, now)
        for action in actions:
            self._perform(action)
        self._arm_timer()
        if not isinstance(event, TimePassed | WorkerHeard) or any(not isinstance(action, Beat) for action in actions):
            # Signs of life come at any time, and are no work.
            self.idle_check.on_event(now)
        self._acceptance_log.on_event()
        if self.engine.is_ready != was_ready:
            self._report_health()
        if not was_known:
            for client in self._clients.values():
                self._send_cell_info(client)

    def _arm_timer(self) -> None:
        """See that the engine is told when the time comes that it waits for.

        That time moves with every step: a timer that is early is left to run out and armed anew.
        """
        wakeup = self.engine.next_wakeup()
        if self._timer is not None and self._timer_at <= wakeup:
            return
        if self._timer is not None:
            self._timer.cancel()
        # The time is kept beside the handle: for one that is due at once uvloop's does not know it.
        self._timer, self._timer_at = self._loop.call_at(wakeup, self._on_timer), wakeup

    def _on_timer(self) -> None:
        self._timer = None
        self.on_event(TimePassed())

    def _perform(self, action: Action) -> None:
        match action:
            case SendStep(rank, step):
                self._domains[self.engine.topology.domain_of(rank)].send(rank, step)
            case Deliver(client, outputs) if client == DIRECT_CLIENT:
                self.direct_clients.deliver(outputs)
            case Deliver(client, outputs):
                if client in self._clients:
                    response = exchange_pb2.ExchangeResponse(outputs=encode_outputs(outputs))
                    self._clients[client].send(response, self._loop.time())
            case CloseClient(client, error):
                if client in self._clients:
                    self._clients[client].close(error)
            case Beat(progress):
                self._beat(progress)
            case DropDomain(domain, epoch, reason):
                ranks = list(self.engine.topology.ranks_of(domain))
                logger.error("workers are given up", extra={"ranks": ranks, "epoch": epoch, "reason": reason})
                self._domains[domain].drop(epoch)
            case Exit():
                self._exit(action)

    def _beat(self, progress: int) -> None:
        now = self._loop.time()
        for domain in self._domains:
            domain.beat(progress)
        for client in self._clients.values():
            client.beat(progress, now)

    def _exit(self, exit_: Exit) -> None:
        logger.error("the scheduler ends", extra={"reason": exit_.reason})
        self.failed.set()

    def _report_health(self) -> None:
        update = self._loop.create_task(self._health.set_serving(self.engine.is_ready))
        self._health_updates.add(update)
        update.add_done_callback(self._health_updates.discard)

    def _default_sampling(self) -> common_pb2.SamplingParams:
        """What requests leave to the model."""
        model = self.engine.model
        return common_pb2.SamplingParams.FromString(b"" if model is None else model.default_sampling)

    def _send_cell_info(self, client: ClientLink) -> None:
        """Tell a replica about the cell; nothing until a worker has been attached for the first time."""
        model, limits = self.engine.model, self.engine.model_limits
        if model is None or limits is None:
            return
        cell_info = exchange_pb2.CellInfo(
            scheduler_instance_id=self.instance_id,
            model_digest=model.model_digest,
            context_length=limits.context_length,
            logits_width=limits.logits_width,
            eos_token_ids=model.eos_token_ids,
            num_pool_tokens=limits.num_pool_tokens,
            default_sampling=self._default_sampling(),
            exact_fingerprint=self.engine.exact_fingerprint,
        )
        client.send(exchange_pb2.ExchangeResponse(cell_info=cell_info), self._loop.time())
