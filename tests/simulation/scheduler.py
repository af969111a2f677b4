"""The simulated scheduler process: the real engine, and around it what the shell does, sans sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import cast

import grpc

from lockstep.internal.v1 import exchange_pb2, worker_pb2
from services.scheduler.attach import Standing
from services.scheduler.engine import Engine
from services.scheduler.events import (
    AbortRequest,
    Action,
    Beat,
    ClientGone,
    CloseClient,
    Deliver,
    DropDomain,
    Event,
    Exit,
    SendStep,
    StepReturned,
    TimePassed,
)
from services.scheduler.exchange_codec import encode_outputs
from services.scheduler.server import CellServer, ClientLink
from services.scheduler.servicer import ExchangeServicer
from services.scheduler.token_door import DOOR_CLIENT, TokenDoor
from services.scheduler.worker_client import decode_result, encode_step
from tests.simulation.clock import Clock
from tests.simulation.direct_calls import DirectCall
from tests.simulation.domain import SimulatedDomain
from tests.simulation.domain_link import DomainLink
from tests.simulation.exchange import MAX_BEAT_GAP_S, ExchangeStream
from tests.simulation.faults import FaultMix
from tests.simulation.step_stream import Answer
from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.watch import EngineWatch
from tests.simulation.workload import CellSettings

# A loop that has nothing to do but to beat is simulated as a slow one, but not as one that was stopped.
_LATENESS_S = 0.9
# What else there is to do at the moment of a deadline comes before its timer, or after.
_TIMER_LATENESSES_S = (0.0, 0.005)


class SchedulerProcess:
    """One run of a scheduler: the engine under watch, its timer, its links to the workers and its replicas' streams.

    Invariant: after `kill` nothing reaches the engine, and nothing leaves it.
    """

    def __init__(
        self,
        number: int,
        settings: CellSettings,
        clock: Clock,
        rng: Random,
        mix: FaultMix,
        *,
        domains: Sequence[SimulatedDomain],
        watch: EngineWatch,
        on_exit: Callable[[SchedulerProcess], None],
    ) -> None:
        self.instance_id = f"scheduler-{number}"
        self.engine = Engine(settings.policy, settings.cache, settings.topology)
        self.watch = watch
        self.is_alive = True
        self.num_steps = 0
        self.streams: dict[int, ExchangeStream] = {}
        self._clients: dict[int, ClientLink] = {}
        # In the order in which they began.
        self.calls: dict[DirectCall, None] = {}
        # What has to do with sockets and processes is left out of it.
        self.loop = VirtualLoop(clock, self.when_running)  # type: ignore[abstract]
        with self.loop.running():
            self.door = TokenDoor(lambda: self.engine.model_limits, self.on_event)
        self._topology = settings.topology
        self._clock = clock
        self._timer_lateness_s = rng.choice(_TIMER_LATENESSES_S)
        self._on_exit = on_exit
        self._stopped_until = 0.0
        self._timer: float | None = None
        self._is_timer_background = False
        self._lateness_s = 0.0
        standing = Standing(self.instance_id, settings.topology.dp_size, rng.random)
        self._links = [
            DomainLink(number, self, standing, settings, clock, rng, mix=mix, workers=workers)
            for number, workers in enumerate(domains)
        ]

    @property
    def is_stopped(self) -> bool:
        """Whether the process does nothing (SIGSTOP)."""
        return self._stopped_until > self._clock.now

    def kill(self) -> None:
        """The process is gone; whoever is linked to it notices."""
        if not self.is_alive:
            return
        self.is_alive = False
        for link in self._links:
            link.close()
        for stream in list(self.streams.values()):
            stream.break_()
        for call in list(self.calls):
            call.break_()

    def exit(self, reason: str) -> None:
        """The process ends by its own decision."""
        if self.is_alive:
            self.kill()
            self._on_exit(self)

    def stop(self, duration_s: float) -> None:
        """The process does nothing for so long; what comes meanwhile waits."""
        self._stopped_until = max(self._stopped_until, self._clock.now + duration_s)

    def when_running(self, action: Callable[[], object]) -> None:
        """Do something in the process: now, or when it is continued."""
        if self.is_stopped:
            self._clock.at(self._stopped_until, lambda: self.when_running(action))
        elif self.is_alive:
            action()

    def become_zombie(self) -> None:
        """Its replicas lose it, another scheduler takes its place, and it does not know."""
        for link in self._links:
            link.fall_behind()
        self.lose_replicas()

    def lose_replicas(self) -> None:
        """Its replicas give it up, and it does not know."""
        for stream in self.streams.values():
            stream.break_(scheduler_notices=False)
        for call in list(self.calls):
            call.break_(server_notices=False)

    def check_calls(self) -> None:
        """Check that the engine goes on with nothing for calls that have ended."""
        handles = {seq.handle for seq in self.engine._requests.choices() if seq.client == DOOR_CLIENT}
        assert not self.is_alive or handles == set(self.door._choices), "a request goes on without its call"

    def check_end(self) -> None:
        """Check an engine that has nothing more to do."""
        self.watch.check_end(self.engine)

    def connect(self, stream: ExchangeStream) -> None:
        """A replica's stream is open; its handler begins."""
        servicer = ExchangeServicer(cast(CellServer, _StreamCell(self, stream, self._clock)))
        self.streams[stream.number] = stream
        handler = servicer.Exchange(stream.requests(), cast(grpc.aio.ServicerContext, stream))
        stream.task = self.loop.create_task(handler)
        stream.task.add_done_callback(stream.on_end)

    def link(self, stream: ExchangeStream) -> ClientLink:
        """Take in a replica; it is told about the cell as soon as a worker was attached once."""
        client = ClientLink(stream.number, lambda: self.unlink(client))
        self._clients[stream.number] = client
        self._send_cell_info(client)
        return client

    def unlink(self, client: ClientLink) -> None:
        """Forget a replica whose stream ended, or ends; nothing happens the second time."""
        self.streams.pop(client.number, None)
        if self._clients.pop(client.number, None) is not None:
            self.on_event(ClientGone(client.number))

    def disconnect(self, stream: ExchangeStream) -> None:
        """The end of a replica's stream is noticed."""
        if stream.task is not None:
            self.when_running(stream.task.cancel)

    def check_unread(self, stream: ExchangeStream) -> None:
        """Check that a replica that has not read for too long has lost its stream."""
        has_looked = self._clock.now > self._stopped_until + MAX_BEAT_GAP_S
        is_kept = self.is_alive and has_looked and stream.number in self._clients
        assert not is_kept, "a replica that does not read keeps its stream"

    def on_event(self, event: Event) -> None:
        """Hand an event to the engine, watch what it says, and do it."""
        if not self.is_alive:
            return
        had_model = self.engine.model is not None
        now = self._clock.now
        actions = self.engine.on_event(event, now)
        self.watch.on_event(self.engine, event, actions, now)
        for action in actions:
            self._perform(action)
        if not had_model and self.engine.model is not None:
            for client in self._clients.values():
                self._send_cell_info(client)
        is_dull = isinstance(event, TimePassed) and all(isinstance(action, Beat) for action in actions)
        self._lateness_s = _LATENESS_S if is_dull else 0.0
        self._arm_timer()

    def on_request(self, stream: ExchangeStream, payload: bytes) -> None:
        """A message of a replica arrives."""
        self.when_running(lambda: stream.take_request(payload))

    def on_answer(self, answer: Answer) -> None:
        """A step's answer arrives, perhaps one of an old epoch."""
        self.watch.on_answer(answer)
        self.on_event(StepReturned(answer.rank, decode_result(worker_pb2.StepResult.FromString(answer.payload))))

    def abort_request(self, request_id: str) -> None:
        """Somebody calls for the end of a request."""
        self.when_running(lambda: self.on_event(AbortRequest(request_id)))

    def flush_prefix_cache(self) -> None:
        """Somebody calls for an empty prefix cache."""
        self.when_running(self.engine.flush_prefix_cache)

    def _send_cell_info(self, client: ClientLink) -> None:
        if self.engine.model is not None:
            cell_info = exchange_pb2.CellInfo(exact_fingerprint=self.engine.exact_fingerprint)
            client.send(exchange_pb2.ExchangeResponse(cell_info=cell_info), self._clock.now)

    def _perform(self, action: Action) -> None:
        match action:
            case SendStep(rank, step):
                self.num_steps += 1
                link = self._links[self._topology.domain_of(rank)]
                link.send(rank, encode_step(step).SerializeToString(), step.step_id)
            case Deliver(client, outputs) if client == DOOR_CLIENT:
                self.door.deliver(outputs)
            case Deliver(client, outputs):
                if client in self._clients:
                    response = exchange_pb2.ExchangeResponse(outputs=encode_outputs(outputs))
                    self._clients[client].send(response, self._clock.now)
            case CloseClient(client, error):
                if client in self._clients:
                    self._clients[client].close(error)
            case DropDomain(domain, epoch):
                self._links[domain].drop(epoch)
            case Beat(progress):
                for link in self._links:
                    link.beat()
                for replica in self._clients.values():
                    replica.beat(progress, self._clock.now)
            case Exit(reason):
                self.exit(reason)

    def _arm_timer(self) -> None:
        wakeup = self.engine.next_wakeup()
        wakeup = min(wakeup + self._lateness_s, self.watch.first_deadline(wakeup)) + self._timer_lateness_s
        # Who has nothing to do beats as long as anything else goes on.
        is_background = not self.watch.has_work
        if self._timer is not None and self._timer <= wakeup and is_background >= self._is_timer_background:
            return
        self._timer, self._is_timer_background = wakeup, is_background
        self._clock.at(wakeup, lambda: self._on_timer(wakeup), is_background=is_background)

    def _on_timer(self, wakeup: float) -> None:
        if self._timer == wakeup:
            self.when_running(self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.on_event(TimePassed())


class _StreamCell:
    """The part of a `CellServer` that the handler of one stream uses."""

    def __init__(self, process: SchedulerProcess, stream: ExchangeStream, clock: Clock) -> None:
        self._clock = clock
        self._process = process
        self._stream = stream

    def connect(self) -> ClientLink:
        return self._process.link(self._stream)

    def disconnect(self, client: ClientLink) -> None:
        self._process.unlink(client)

    def on_event(self, event: Event) -> None:
        """Hand in an event; what the watch finds must not end with the handler, which ends a stream for any error."""
        try:
            self._process.on_event(event)
        except Exception as error:  # noqa: BLE001
            self._clock.after(0.0, partial(_raise, error))


def _raise(error: Exception) -> None:
    raise error
