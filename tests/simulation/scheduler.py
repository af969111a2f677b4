"""The simulated scheduler process: the real engine, and around it what the shell does, sans sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

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
from services.scheduler.exchange_codec import decode_request
from services.scheduler.token_door import DOOR_CLIENT, TokenDoor
from services.scheduler.worker_client import decode_result, encode_step
from tests.simulation.clock import Clock
from tests.simulation.direct_calls import DirectCall
from tests.simulation.domain import SimulatedDomain
from tests.simulation.domain_link import DomainLink
from tests.simulation.exchange import ExchangeStream
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
        """A replica's stream is open; it is told about the cell as soon as a worker was attached once."""
        self.streams[stream.number] = stream
        if self.engine.model is not None:
            stream.send_cell_info(self.engine.exact_fingerprint)

    def disconnect(self, stream: ExchangeStream) -> None:
        """The end of a replica's stream is noticed."""
        self.when_running(lambda: self._disconnect(stream))

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
            for stream in self.streams.values():
                stream.send_cell_info(self.engine.exact_fingerprint)
        is_dull = isinstance(event, TimePassed) and all(isinstance(action, Beat) for action in actions)
        self._lateness_s = _LATENESS_S if is_dull else 0.0
        self._arm_timer()

    def on_request(self, stream: ExchangeStream, payload: bytes) -> None:
        """A message of a replica arrives."""
        self.when_running(lambda: self._take_request(stream, payload))

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

    def _disconnect(self, stream: ExchangeStream) -> None:
        if self.streams.pop(stream.number, None) is not None:
            self.on_event(ClientGone(stream.number))

    def _take_request(self, stream: ExchangeStream, payload: bytes) -> None:
        if stream.number in self.streams:
            request = exchange_pb2.ExchangeRequest.FromString(payload)
            self.on_event(decode_request(stream.number, request))

    def _perform(self, action: Action) -> None:
        match action:
            case SendStep(rank, step):
                self.num_steps += 1
                link = self._links[self._topology.domain_of(rank)]
                link.send(rank, encode_step(step).SerializeToString(), step.step_id)
            case Deliver(client, outputs) if client == DOOR_CLIENT:
                self.door.deliver(outputs)
            case Deliver(client, outputs):
                if client in self.streams:
                    self.streams[client].send_outputs(outputs)
            case CloseClient(client):
                if client in self.streams:
                    self.streams[client].break_()
            case DropDomain(domain, epoch):
                self._links[domain].drop(epoch)
            case Beat():
                for link in self._links:
                    link.beat()
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
