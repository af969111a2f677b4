"""The simulated scheduler process: the real cell server in virtual time, with links to simulated workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import cast

import grpc

from lockstep.internal.v1 import worker_pb2
from lockstep.v1 import scheduler_pb2
from services.scheduler.cell.attach import ClaimStanding
from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import Action, Beat, Event, Exit, StepReturned, TimePassed
from services.scheduler.server.cell_server import CellServer
from services.scheduler.server.direct_clients import DIRECT_CLIENT
from services.scheduler.server.servicer import ExchangeServicer, SchedulerServicer
from services.scheduler.workers.worker_client import decode_result
from shared.health import Health
from tests.simulation.clock import Clock
from tests.simulation.direct_calls import DirectCall
from tests.simulation.domain import SimulatedDomain
from tests.simulation.domain_link import DomainLink
from tests.simulation.exchange import MAX_CLOSE_S, ExchangeStream
from tests.simulation.faults import FaultMix
from tests.simulation.pause import Pause
from tests.simulation.step_stream import Answer
from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.watch import EngineWatch
from tests.simulation.workload import CellSettings

# A loop that has nothing to do but to beat is simulated as a slow one, but not as one that was stopped.
_BEAT_LATENESS_S = 0.9
# What else there is to do at the moment of a deadline comes before its timer, or after.
_TIMER_LATENESSES_S = (0.0, 0.005)
_MAX_TIMER_LATENESS_S = 0.006
_MAX_UNREAD_S = 2.0
# From the moment at which a process is to end until it is gone.
_STOP_GRACE_S = 0.5


class WatchedEngine(Engine):
    """The engine, and with it the watch that checks all that it says, and that it is told of the time."""

    def __init__(self, settings: CellSettings, watch: EngineWatch, pause: Pause) -> None:
        super().__init__(settings.policy, settings.cache, settings.topology)
        self._pause = pause
        self._watch = watch
        self._is_idle = False

    def on_event(self, event: Event, now: float) -> list[Action]:
        """See `Engine`."""
        due_at = self.next_wakeup()
        if now > max(due_at, self._pause.until) + _MAX_TIMER_LATENESS_S:
            assert now <= self.wakes_at(due_at) + _MAX_TIMER_LATENESS_S, "the engine is not woken in time"
        actions = super().on_event(event, now)
        self._watch.on_event(self, event, actions, now)
        self._is_idle = isinstance(event, TimePassed) and all(isinstance(action, Beat) for action in actions)
        return actions

    def wakes_at(self, when: float) -> float:
        """When a loop that has nothing to do before takes note of a timer for `when`."""
        is_idle_beat = self._is_idle and when == self.next_wakeup()
        lateness_s = _BEAT_LATENESS_S if is_idle_beat else 0.0
        return min(when + lateness_s, self._watch.first_deadline(when))


class SchedulerProcess:
    """One run of a scheduler, with its replicas' streams and its direct calls.

    It does what the service's `serve` does, but for sockets. A bug that ends it ends the simulation.

    Invariant: after `kill` nothing reaches the cell, and nothing leaves it.
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
        self.watch = watch
        self._pause = Pause(clock)
        self.engine = WatchedEngine(settings, watch, self._pause)
        self.is_alive = True
        # In the order in which they began.
        self.streams: dict[ExchangeStream, None] = {}
        self.calls: dict[DirectCall, None] = {}
        self._clock = clock
        self._on_exit = on_exit
        self._is_ending = False
        self._health = Health(())
        self._links: list[DomainLink] = []
        standing = ClaimStanding(self.instance_id, settings.topology.dp_size, rng.random)

        def link_domain(domain: int, on_event: Callable[[Event], None], on_exit: Callable[[Exit], None]) -> DomainLink:
            link = DomainLink(
                domain,
                self,
                standing,
                settings,
                clock,
                rng,
                mix=mix,
                workers=domains[domain],
                on_event=on_event,
                on_exit=on_exit,
            )
            self._links.append(link)
            return link

        timer_lateness_s = rng.choice(_TIMER_LATENESSES_S)
        # What has to do with sockets and processes is left out of it.
        self.loop = VirtualLoop(  # type: ignore[abstract]
            clock, self.when_running, lambda when: self.engine.wakes_at(when) + timer_lateness_s
        )
        with self.loop.running():
            self.cell = CellServer(
                self.engine,
                link_domain,
                instance_id=self.instance_id,
                health=self._health,
                replica_silence_s=settings.policy.worker_silence_s,
            )
        self.servicer = SchedulerServicer(self.cell, _MAX_UNREAD_S)
        self._exchange = ExchangeServicer(self.cell)
        self._worker_links = self.loop.create_task(self.cell.run_worker_links())
        self.loop.create_task(self.cell.failed.wait()).add_done_callback(lambda _: self._exit())

    @property
    def is_stopped(self) -> bool:
        """Whether the process does nothing (SIGSTOP)."""
        return self._pause.is_on

    @property
    def _is_over(self) -> bool:
        """Whether the engine is told nothing any more, or need not be."""
        return not self.is_alive or self._is_ending or self.cell.failed.is_set()

    def kill(self) -> None:
        """The process is gone; whoever is linked to it notices."""
        if not self.is_alive:
            return
        self.is_alive = False
        for link in self._links:
            link.close()
        for stream in list(self.streams):
            stream.break_()
        for call in list(self.calls):
            call.break_()

    def terminate(self) -> None:
        """The process is told to end (SIGTERM)."""
        self.when_running(self._end)

    def stop(self, duration_s: float) -> None:
        """The process does nothing for so long; what comes meanwhile waits."""
        self._pause.extend(duration_s)

    def when_running(self, action: Callable[[], object]) -> None:
        """Do something in the process: now, or when it is continued.

        Raises:
            Exception: the bug that the process would end by.
        """
        self._pause.when_over(lambda: self._do(action))

    def _do(self, action: Callable[[], object]) -> None:
        if not self.is_alive:
            return
        self.loop.run_once(action)
        if self.cell.bug is not None:
            raise self.cell.bug

    def become_zombie(self) -> None:
        """Its replicas lose it, another scheduler takes its place, and it does not know."""
        for link in self._links:
            link.fall_behind()
        self.lose_replicas()

    def lose_replicas(self) -> None:
        """Its replicas give it up, and it does not know."""
        for stream in self.streams:
            stream.break_(scheduler_notices=False)
        for call in list(self.calls):
            call.break_(server_notices=False)

    def check_calls(self) -> None:
        """Check that the engine goes on with nothing for calls that have ended."""
        handles = {seq.handle for seq in self.engine._requests.choices() if seq.client == DIRECT_CLIENT}
        assert self._is_over or handles == set(self.cell.direct_clients._choices), "a request goes on without its call"

    def check_end(self) -> None:
        """Check a process that has nothing more to do."""
        self.watch.check_end(self.engine)
        assert self._health.is_serving == self.engine.is_ready, "its health is another one"
        assert not self.cell.idle_check.num_failures, "the check of an idle cell has failed"

    def close(self) -> None:
        """The simulation is over, and nothing is done any more."""
        self.is_alive = False
        self.cell.failed.set()
        self.loop.close()

    def connect(self, stream: ExchangeStream) -> None:
        """A replica's stream is open; its handler begins."""
        self.streams[stream] = None
        handler = self._exchange.Exchange(stream.requests(), cast(grpc.aio.ServicerContext, stream))
        stream.task = self.loop.create_task(handler)
        stream.task.add_done_callback(lambda _: self._on_stream_end(stream))
        stream.task.add_done_callback(stream.on_end)

    def disconnect(self, stream: ExchangeStream) -> None:
        """The end of a replica's stream is noticed."""
        if stream.task is not None:
            self.when_running(stream.task.cancel)

    def check_unread(self, stream: ExchangeStream) -> None:
        """Check that a replica that has not read for too long has lost its stream."""
        has_looked = self._clock.now > self._pause.until + MAX_CLOSE_S
        is_kept = self.is_alive and has_looked and stream in self.streams
        assert not is_kept, "a replica that does not read keeps its stream"

    def on_request(self, stream: ExchangeStream, payload: bytes) -> None:
        """A message of a replica arrives."""
        self.when_running(lambda: stream.take_request(payload))

    def on_answer(self, answer: Answer) -> None:
        """A step's answer arrives, perhaps one of an old epoch."""
        self.watch.on_answer(answer)
        self.cell.on_event(StepReturned(answer.rank, decode_result(worker_pb2.StepResult.FromString(answer.payload))))

    def abort_request(self, request_id: str) -> None:
        """Somebody calls for the end of a request."""
        self.when_running(lambda: self.cell.direct_clients.abort(scheduler_pb2.AbortRequest(request_id=request_id)))

    def flush_prefix_cache(self) -> None:
        """Somebody calls for an empty prefix cache."""
        self.when_running(self.engine.flush_prefix_cache)

    def _on_stream_end(self, stream: ExchangeStream) -> None:
        """A handler has ended: the engine goes on with nothing for replicas that are not linked."""
        del self.streams[stream]
        clients = {seq.client for seq in self.engine._requests.choices()} - {DIRECT_CLIENT}
        assert self._is_over or clients <= self.cell._clients.keys(), "a request goes on without its stream"

    def _exit(self) -> None:
        """The process ends by its own decision."""
        if self.is_alive:
            self._end()
            self._on_exit(self)

    def _end(self) -> None:
        """Whoever is linked to it is told, and has a moment to hear it."""
        if self._is_ending:
            return
        self._is_ending = True
        self.cell.close()
        self._worker_links.cancel()
        self._clock.after(_STOP_GRACE_S, self.kill)
