"""The asyncio shell around the engine: turns messages into events and actions into messages.

There is one event loop and no second thread: another busy one would cost the step path milliseconds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2
from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import (
    Action,
    Beat,
    ClientClosed,
    CloseClient,
    Deliver,
    DrainRank,
    DropDomain,
    Event,
    Exit,
    LinkDomain,
    RankHeartbeat,
    ReleaseDomain,
    SendStep,
    TimePassed,
    UndrainRank,
    UnlinkDomain,
)
from services.scheduler.server.acceptance_log import AcceptanceLog
from services.scheduler.server.client_link import ClientLink
from services.scheduler.server.direct_clients import DIRECT_CLIENT, DirectClients
from services.scheduler.server.event_codec import EventClock
from services.scheduler.server.exchange_codec import encode_heartbeat, encode_outputs
from services.scheduler.server.failpoint import SubmitFailpoint
from services.scheduler.server.idle_check import IdleCheck
from services.scheduler.server.kv_events import KvEvents
from services.scheduler.server.replica_drains import ReplicaDrains
from services.scheduler.server.trials import Trials
from services.scheduler.server.worker_links import WorkerAccess, WorkerLinks
from shared.errors import InvalidRequestError, SchedulerLostError, Violation
from shared.ids import DpRank
from shared.network.health import Health

logger = logging.getLogger(__name__)


class CellServer:
    """Runs one engine with its links to replicas and workers, and its direct clients.

    When the engine or the attach protocol asks to exit, or after a bug, `failed` is set and nothing is done any more.
    """

    def __init__(
        self,
        engine: Engine,
        workers: WorkerAccess,
        *,
        instance_id: str,
        health: Health,
        replica_silence_s: float,
        failpoint: SubmitFailpoint | None = None,
    ) -> None:
        """Make a cell in the running event loop.

        Args:
            engine: Receives events from this object only.
            health: The services are serving while any workers are attached, the whole server while they take work.
            replica_silence_s: See `ClientLink`.
        """
        self.instance_id = instance_id
        self.engine = engine
        self.direct_clients = DirectClients(
            lambda: self.engine.facts.limits,
            self.on_event,
            self._default_sampling,
            weights_digest=lambda: self.engine.facts.weights_digest,
        )
        self.kv_events = KvEvents(engine)
        self.replica_drains = ReplicaDrains(self._beat_workers, asyncio.get_running_loop().time)
        self.trials = Trials()
        self.failed = asyncio.Event()
        self.bug: Exception | None = None
        """What ended the cell, if it was a bug."""
        self._replica_silence_s = replica_silence_s
        self._health = health
        self.clients: dict[int, ClientLink] = {}
        """Connected replicas, by the engine's number."""
        self._client_numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self.clock = EventClock(self._loop.time)
        self.idle_check = IdleCheck(self.engine, self._loop)
        self._acceptance_log = AcceptanceLog(self.engine.state().counters)
        self._health_updates: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        # The progress of the last heartbeat.
        self._progress = 0
        self._failpoint = failpoint
        self._worker_links = WorkerLinks(engine, workers, self.on_event, self._exit)

    async def run_worker_links(self) -> None:
        """Keep the workers attached until cancelled, or until a bug."""
        # Triggers the first heartbeat, which schedules the next ones.
        self.on_event(TimePassed())
        try:
            await self._worker_links.run()
        except ExceptionGroup as bugs:
            logger.exception("the scheduler exits: a bug in the links to the workers")
            self._end_after_bug(bugs)

    async def release_workers(self) -> None:
        """Tell the workers that no scheduler needs them any more, if this one, which was asked to end, served the last.

        Otherwise the next scheduler continues the requests.
        """
        is_over = self.replica_drains.is_over and self.direct_clients.is_idle
        if is_over and not self.failed.is_set():
            await self._worker_links.say_last_words()

    def close(self) -> None:
        """Tell all clients to take their requests to the next scheduler.

        After a bug, replicas get no message: a request may have caused it, and they look for one only when a scheduler
        dies without explanation.
        """
        error = SchedulerLostError("the scheduler is shutting down; resend the request with its output so far")
        self.direct_clients.close(error)
        self.kv_events.close(error)
        if self.bug is None:
            for client in self.clients.values():
                client.close(error)

    def is_idle(self) -> bool:
        """Whether no request is running or waiting."""
        state = self.engine.state()
        return not state.num_running and not state.num_waiting

    def connect(self) -> ClientLink:
        """Add a replica; it gets a heartbeat at once, after the cell's info if this scheduler holds workers."""
        number = next(self._client_numbers)
        client = ClientLink(number, lambda: self.disconnect(client), self._replica_silence_s)
        self.clients[number] = client
        self.replica_drains.link(number)
        self._tell([client], self._loop.time())
        return client

    def disconnect(self, client: ClientLink) -> None:
        """Remove a replica and abort its requests; a second call does nothing."""
        if self.clients.pop(client.number, None) is not None:
            self.replica_drains.unlink(client.number)
            self.trials.unlink(client.number)
            self.on_event(ClientClosed(client.number))

    def flush_prefix_cache(self) -> int:
        """Forget the contents of all blocks; returns how many had one."""
        num_blocks = self.engine.flush_prefix_cache()
        self.kv_events.wake()
        return num_blocks

    def drain(self, rank: int) -> None:
        """Keep work away from a rank's domain.

        Raises:
            InvalidRequestError: there is no such rank.
        """
        self.on_event(DrainRank(self._check_rank(rank)))

    def undrain(self, rank: int) -> None:
        """Take `drain` back.

        Raises:
            InvalidRequestError: there is no such rank.
        """
        self.on_event(UndrainRank(self._check_rank(rank)))

    def on_event(self, event: Event) -> None:
        """Hand an event to the engine and carry out its actions.

        Never raises: after an exception the engine's state may not match the outside world, so the process ends.
        """
        if self.failed.is_set():
            return
        if self._failpoint is not None:
            self._failpoint.check(event)
        try:
            self._handle(event)
        except Exception as bug:
            logger.exception("the scheduler exits: a bug", extra={"event": type(event).__name__})
            self._end_after_bug(bug)

    def _check_rank(self, rank: int) -> DpRank:
        dp_size = self.engine.topology.dp_size
        if rank >= dp_size:
            problem = f"must be below {dp_size}, the number of ranks"
        elif self.engine.is_vacant(DpRank(rank)):
            problem = "no endpoint has this place"
        else:
            return DpRank(rank)
        raise InvalidRequestError.from_violations([Violation("dp_rank", "OUT_OF_RANGE", problem)])

    def _end_after_bug(self, bug: Exception) -> None:
        self.bug = bug
        self.failed.set()

    def _handle(self, event: Event) -> None:
        now = self._loop.time()
        was, facts_version = self._readiness(), self.engine.facts.version
        actions = self.engine.on_event(event, now)
        for action in actions:
            self._perform(action)
        self._arm_timer()
        if not isinstance(event, TimePassed | RankHeartbeat) or any(not isinstance(action, Beat) for action in actions):
            # Heartbeats come all the time and do not count as activity.
            self.idle_check.on_event(now)
        self._acceptance_log.on_event()
        self.kv_events.wake()
        if self._readiness() != was:
            self._report_health()
            self._tell(self.clients.values(), now)
        elif self.engine.facts.version != facts_version:
            for client in self.clients.values():
                self._send_cell_info(client, now)

    def _readiness(self) -> tuple[bool, bool]:
        return self.engine.takes_work, self.engine.is_ready

    def _arm_timer(self) -> None:
        """A timer that is too early is left to fire and then set again, because the time changes with every step."""
        wakeup = self.engine.next_wakeup()
        if self._timer is not None and self._timer_at <= wakeup:
            return
        if self._timer is not None:
            self._timer.cancel()
        # The time is stored next to the handle, because uvloop's handle for an immediate call does not know it.
        self._timer, self._timer_at = self._loop.call_at(wakeup, self._on_timer), wakeup

    def _on_timer(self) -> None:
        self._timer = None
        self.on_event(TimePassed())

    def _perform(self, action: Action) -> None:
        match action:
            case SendStep(rank, step):
                self._worker_links.send(rank, step)
            case Deliver(client, outputs) if client == DIRECT_CLIENT:
                self.direct_clients.deliver(outputs)
            case Deliver(client, outputs):
                if (link := self.clients.get(client)) is not None:
                    message = encode_outputs(outputs, has_timings=link.has_timings)
                    link.send(exchange_pb2.ExchangeResponse(outputs=message), self._loop.time())
            case CloseClient(client, error):
                if client in self.clients:
                    self.clients[client].close(error)
            case Beat(progress):
                self._beat(progress)
            case DropDomain(domain, epoch, reason, retry_s):
                level = logging.DEBUG if action.is_repeated else logging.ERROR
                ranks = list(self.engine.topology.ranks_of(domain))
                logger.log(level, "giving up workers", extra={"ranks": ranks, "epoch": epoch, "reason": reason})
                self._worker_links.drop(domain, epoch, retry_s)
            case ReleaseDomain(domain, epoch):
                ranks = list(self.engine.topology.ranks_of(domain))
                logger.info("workers drained", extra={"ranks": ranks, "epoch": epoch})
                self._worker_links.release(domain, epoch)
            case LinkDomain() | UnlinkDomain():
                self._worker_links.perform(action)
            case Exit():
                self._exit(action)

    def _beat(self, progress: int) -> None:
        now, self._progress = self._loop.time(), progress
        self._beat_workers()
        heartbeat = self._make_heartbeat()
        for client in self.clients.values():
            client.beat(self._address(heartbeat, client), now)

    def _beat_workers(self) -> None:
        self._worker_links.beat(self._progress, is_staying=self.replica_drains.is_staying)

    def _tell(self, clients: Iterable[ClientLink], now: float) -> None:
        """Say whether this scheduler holds workers, by which replicas choose between schedulers, and takes work.

        The heartbeat comes last, so that a replica that uses the cell knows its facts and how busy it is.
        """
        heartbeat = self._make_heartbeat()
        for client in clients:
            self._send_cell_info(client, now)
            client.send(exchange_pb2.ExchangeResponse(heartbeat=self._address(heartbeat, client)), now)

    def _make_heartbeat(self) -> exchange_pb2.SchedulerHeartbeat:
        return encode_heartbeat(self._progress, self.engine.state())

    def _address(
        self, heartbeat: exchange_pb2.SchedulerHeartbeat, client: ClientLink
    ) -> exchange_pb2.SchedulerHeartbeat:
        """The heartbeat with what only this replica is told."""
        heartbeat.has_trial = self.trials.is_given_to(client.number)
        return heartbeat

    def _exit(self, exit_: Exit) -> None:
        logger.error("the scheduler exits", extra={"reason": exit_.reason})
        self.failed.set()

    def _report_health(self) -> None:
        takes_work, is_ready = self._readiness()
        update = self._loop.create_task(self._health.set_serving(takes_work, are_services=is_ready))
        self._health_updates.add(update)
        update.add_done_callback(self._health_updates.discard)

    def _default_sampling(self) -> common_pb2.SamplingParams:
        model = self.engine.facts.model
        return common_pb2.SamplingParams.FromString(b"" if model is None else model.default_sampling)

    def _send_cell_info(self, client: ClientLink, now: float) -> None:
        """Send the cell's facts if this scheduler holds workers and the replica does not know them."""
        model, limits = self.engine.facts.model, self.engine.facts.limits
        if not self.engine.is_ready or model is None or limits is None:
            return
        cell_info = exchange_pb2.CellInfo(
            scheduler_instance_id=self.instance_id,
            model_digest=model.model_digest,
            context_length=limits.context_length,
            logits_width=limits.logits_width,
            eos_token_ids=model.eos_token_ids,
            num_pool_tokens=limits.num_pool_tokens,
            default_sampling=self._default_sampling(),
            exact_fingerprint=self.engine.facts.exact_fingerprint,
            weights_digest=self.engine.facts.weights_digest,
            introduction=self.engine.facts.introduction.encode(),
            implementation=model.implementation,
            task="embed" if model.embeds else "generate",
        )
        if self.engine.facts.worker_start_s is not None:
            cell_info.worker_start_time.FromMilliseconds(round(1e3 * self.engine.facts.worker_start_s))
        if cell_info != client.cell_info:
            client.cell_info = cell_info
            client.send(exchange_pb2.ExchangeResponse(cell_info=cell_info), now)
