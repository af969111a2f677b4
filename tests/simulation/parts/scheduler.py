"""The simulated scheduler process: the real cell server in virtual time, with links to simulated workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import cast

import grpc
from typing_extensions import override

from lockstep.internal.v1 import worker_pb2
from services.scheduler.cell.domains.scheduler_claim import SchedulerClaim
from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import AbortRequest, Action, Beat, Event, Exit, StepReturned, TimePassed
from services.scheduler.core.batch.sequence import RequestKey
from services.scheduler.server.cell_server import CellServer
from services.scheduler.server.direct_clients import DIRECT_CLIENT
from services.scheduler.server.servicer import ExchangeServicer, SchedulerServicer
from services.scheduler.server.worker_links import WorkerAccess
from shared.network.health import Health
from shared.step.codec import parse_result
from tests.simulation.faults import FaultMix
from tests.simulation.network.clock import Clock
from tests.simulation.network.exchange import MAX_CLOSE_S, ExchangeStream
from tests.simulation.network.step_stream import Answer
from tests.simulation.network.virtual_loop import VirtualLoop
from tests.simulation.parts.direct_calls import DirectCall
from tests.simulation.parts.discovery import HeardDiscovery, SimulatedDiscovery
from tests.simulation.parts.domain import SimulatedDomain
from tests.simulation.parts.domain_link import DomainLink
from tests.simulation.parts.pause import Pause
from tests.simulation.watches.watch import EngineWatch
from tests.simulation.workload import CellSettings

# A loop that only sends heartbeats is simulated as slow, but not as slow as one that was stopped.
_BEAT_LATENESS_S = 0.9
# Other events at the moment of a deadline may run before or after its timer.
_TIMER_LATENESSES_S = (0.0, 0.005)
_MAX_TIMER_LATENESS_S = 0.006
_MAX_UNREAD_S = 2.0
# From the request to end a process until it is gone.
_STOP_GRACE_S = 0.5


class WatchedEngine(Engine):
    """The engine with a watch that checks every action it returns, and that it is woken in time."""

    def __init__(self, settings: CellSettings, watch: EngineWatch, pause: Pause) -> None:
        super().__init__(settings.policy, settings.cache, settings.topology)
        self._pause = pause
        self._watch = watch
        self._is_idle = False

    @override
    def on_event(self, event: Event, now: float) -> list[Action]:
        due_at = self.next_wakeup()
        if now > max(due_at, self._pause.until) + _MAX_TIMER_LATENESS_S:
            assert now <= self.wakes_at(due_at) + _MAX_TIMER_LATENESS_S, "the engine is not woken in time"
        actions = super().on_event(event, now)
        self._watch.on_event(self, event, actions, now)
        self._is_idle = isinstance(event, TimePassed) and all(isinstance(action, Beat) for action in actions)
        return actions

    def wakes_at(self, when: float) -> float:
        """When an otherwise idle loop runs a timer that is due at `when`."""
        is_idle_beat = self._is_idle and when == self.next_wakeup()
        lateness_s = _BEAT_LATENESS_S if is_idle_beat else 0.0
        return min(when + lateness_s, self._watch.first_deadline(when))


class SchedulerProcess:
    """One run of a scheduler, with its replicas' streams and its direct calls.

    Does what the service's `serve` does, without sockets. A bug that would end the process ends the simulation.

    Invariant: after `kill` the cell receives nothing and sends nothing.
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
        discovery: SimulatedDiscovery | None,
        watch: EngineWatch,
        on_exit: Callable[[SchedulerProcess], None],
    ) -> None:
        self.instance_id = f"scheduler-{number}"
        self.watch = watch
        self._pause = Pause(clock)
        self.engine = WatchedEngine(settings, watch, self._pause)
        self.is_alive = True
        # In the order in which they were opened.
        self.streams: dict[ExchangeStream, None] = {}
        self.calls: dict[DirectCall, None] = {}
        self._clock = clock
        self._on_exit = on_exit
        self._is_ending = False
        self._health = Health(())
        self._links: list[DomainLink] = []
        claim = SchedulerClaim(self.instance_id, rng.random)

        def link_domain(
            domain: int, _: Sequence[str], on_event: Callable[[Event], None], on_exit: Callable[[Exit], None]
        ) -> DomainLink:
            link = DomainLink(
                domain,
                self,
                claim,
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

        leaders: Sequence[str] | HeardDiscovery = [str(rank) for rank in settings.topology.ranks]
        if discovery is not None:
            leaders = HeardDiscovery(discovery, self.when_running)
        timer_lateness_s = rng.choice(_TIMER_LATENESSES_S)
        # The abstract methods for sockets and processes are not implemented.
        self.loop = VirtualLoop(  # type: ignore[abstract]
            clock, self.when_running, lambda when: self.engine.wakes_at(when) + timer_lateness_s
        )
        with self.loop.running():
            self.cell = CellServer(
                self.engine,
                WorkerAccess(link_domain, leaders),
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
        """Whether the process is stopped (SIGSTOP)."""
        return self._pause.is_on

    @property
    def _is_over(self) -> bool:
        """Whether the engine no longer receives events, or no longer needs to."""
        return not self.is_alive or self._is_ending or self.cell.failed.is_set()

    def kill(self) -> None:
        """End the process at once; its peers notice broken connections."""
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
        """Ask the process to end (SIGTERM)."""
        self.when_running(self._end)

    def ask(self, drain_s: float, on_stay_over: Callable[[], None]) -> None:
        """Ask the process to end (SIGTERM), perhaps together with its replicas, for which it stays up to `drain_s`.

        `on_stay_over` is called when it stays no longer.
        """

        def end(_: object) -> None:
            if not self._is_over:
                on_stay_over()
                # It runs before the links are closed.
                self.loop.create_task(self.cell.release_workers())
            self._exit()

        stay = self.cell.replica_drains.stay
        self.when_running(lambda: self.loop.create_task(stay(drain_s)).add_done_callback(end))

    def stop(self, duration_s: float) -> None:
        """Stop the process for this long (SIGSTOP); events that arrive meanwhile wait."""
        self._pause.extend(duration_s)

    def when_running(self, action: Callable[[], object]) -> None:
        """Run `action` in the process: now, or when it is continued.

        Raises:
            Exception: The bug that would end the process.
        """
        self._pause.when_over(lambda: self._do(action))

    def _do(self, action: Callable[[], object]) -> None:
        if not self.is_alive:
            return
        self.loop.run_once(action)
        if self.cell.bug is not None:
            raise self.cell.bug

    def become_zombie(self) -> None:
        """Break its replicas' streams and delay its steps without its noticing, as if it had been replaced."""
        for link in self._links:
            link.delay_steps()
        self.lose_replicas()

    def lose_replicas(self) -> None:
        """Break its replicas' streams without its noticing."""
        for stream in self.streams:
            stream.break_(scheduler_notices=False)
        for call in list(self.calls):
            call.break_(server_notices=False)

    def check_calls(self) -> None:
        """Check that the engine computes nothing for calls that have ended."""
        handles = {seq.handle for seq in self.engine._requests.choices() if seq.client == DIRECT_CLIENT}
        assert self._is_over or handles == set(self.cell.direct_clients._choices), "a request outlives its call"

    def check_end(self) -> None:
        """Check a process that has finished all its work."""
        self.watch.check_end(self.engine)
        assert self._health.is_serving == self.engine.takes_work, "its health does not match what the engine says"
        assert not self.cell.idle_check.num_failures, "the check of an idle cell has failed"

    def close(self) -> None:
        """Release everything at the end of the simulation."""
        self.is_alive = False
        self.cell.failed.set()
        self.loop.close()

    def connect(self, stream: ExchangeStream) -> None:
        """Start the handler of a replica's new stream."""
        self.streams[stream] = None
        handler = self._exchange.Exchange(stream.requests(), cast(grpc.aio.ServicerContext, stream))
        stream.task = self.loop.create_task(handler)
        stream.task.add_done_callback(lambda _: self._on_stream_end(stream))
        stream.task.add_done_callback(stream.on_end)

    def disconnect(self, stream: ExchangeStream) -> None:
        """Cancel the handler of a replica's stream, as gRPC does once it notices the broken connection."""
        if stream.task is not None:
            self.when_running(stream.task.cancel)

    def check_unread(self, stream: ExchangeStream) -> None:
        """Check that the stream of a replica that has not read for too long is closed."""
        has_looked = self._clock.now > self._pause.until + MAX_CLOSE_S
        is_kept = self.is_alive and has_looked and stream in self.streams
        assert not is_kept, "a replica that does not read keeps its stream"

    def on_request(self, stream: ExchangeStream, payload: bytes) -> None:
        """Handle a message of a replica."""
        self.when_running(lambda: stream.take_request(payload))

    def on_answer(self, answer: Answer) -> None:
        """Handle a step's answer, possibly from an old epoch."""
        self.watch.on_answer(answer)
        self.cell.on_event(StepReturned(answer.rank, parse_result(worker_pb2.StepResult.FromString(answer.payload))))

    def abort_request(self, request: RequestKey) -> None:
        """Handle an `Abort` call of the request's tenant."""
        self.when_running(lambda: self.cell.on_event(AbortRequest(request.id, request.tenant)))

    def drain(self, rank: int) -> None:
        """Handle a `Drain` call."""
        self.when_running(lambda: self.cell.drain(rank))

    def undrain(self, rank: int) -> None:
        """Handle an `Undrain` call."""
        self.when_running(lambda: self.cell.undrain(rank))

    def flush_prefix_cache(self) -> None:
        """Handle a `FlushPrefixCache` call."""
        self.when_running(self.engine.flush_prefix_cache)

    def _on_stream_end(self, stream: ExchangeStream) -> None:
        """Forget a stream whose handler has ended; the engine must compute nothing for disconnected replicas."""
        del self.streams[stream]
        clients = {seq.client for seq in self.engine._requests.choices()} - {DIRECT_CLIENT}
        assert self._is_over or clients <= self.cell.clients.keys(), "a request outlives its stream"
        linked = self.cell.replica_drains.linked
        assert self._is_over or linked == self.cell.clients.keys(), "it would stay for a replica that is gone"

    def _exit(self) -> None:
        if self.is_alive:
            self._end()
            self._on_exit(self)

    def _end(self) -> None:
        """Close the cell, so that peers are notified, and kill the process after a grace period."""
        if self._is_ending:
            return
        self._is_ending = True
        self.cell.close()
        self._worker_links.cancel()
        self._clock.after(_STOP_GRACE_S, self.kill)
