"""The simulated scheduler process: the real engine, and around it what the shell does, sans sockets."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from lockstep.internal.v1 import exchange_pb2, worker_pb2
from services.scheduler.engine import Engine
from services.scheduler.events import (
    AbortRequest,
    Action,
    ClientGone,
    CloseClient,
    Deliver,
    DropWorker,
    Event,
    Exit,
    SendStep,
    StepReturned,
    TimePassed,
    WorkerAttached,
    WorkerFacts,
    WorkerLost,
)
from services.scheduler.exchange_codec import decode_request
from services.scheduler.worker_client import decode_result, encode_step
from tests.simulation.clock import Clock
from tests.simulation.exchange import ExchangeStream
from tests.simulation.faults import Fault, FaultMix
from tests.simulation.network import Message, Pipe, Trouble
from tests.simulation.watch import EngineWatch
from tests.simulation.worker import Answer, SimulatedWorker, StepStream
from tests.simulation.workload import CONTEXT_LENGTH, EOS_TOKEN_IDS, CellSettings
from tests.support.cell_model import VOCABULARY

_RETRY_S = 0.5
_DELAY_S = (0.0002, 0.002)
_DETOUR_S = (0.0, 4.0)
_STEP_TROUBLE = Trouble(Fault.STEP_LOST, Fault.STEP_REPEATED)
_RESULT_TROUBLE = Trouble(Fault.RESULT_LOST, Fault.RESULT_REPEATED, Fault.RESULT_REORDERED, Fault.RESULT_LATE)


class SchedulerProcess:
    """One run of a scheduler: the engine under watch, its timer, its link to the worker and its replicas' streams.

    Invariant: after `kill` nothing reaches the engine, and nothing leaves it.
    """

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        mix: FaultMix,
        settings: CellSettings,
        worker: SimulatedWorker,
        watch: EngineWatch,
    ) -> None:
        self.engine = Engine(settings.policy, settings.cache)
        self.is_alive = True
        # A zombie is one that another scheduler has replaced without its knowing.
        self.is_zombie = False
        self.num_steps = 0
        self.streams: dict[int, ExchangeStream] = {}
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._watch = watch
        self._link = WorkerLink(self, clock, rng, mix, settings, worker)
        self._timer: float | None = None
        self._link.attach()

    def kill(self) -> None:
        """The process is gone; whoever is linked to it notices."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._link.close()
        for stream in list(self.streams.values()):
            stream.break_()

    def become_zombie(self) -> None:
        """Its replicas lose it, another scheduler takes its place, and it does not know."""
        self.is_zombie = True
        self._link.fall_behind()
        for stream in self.streams.values():
            stream.break_(scheduler_notices=False)

    def check_end(self) -> None:
        """Check an engine that has nothing more to do."""
        self._watch.check_end(self.engine)

    def connect(self, stream: ExchangeStream) -> None:
        """A replica's stream is open; it is told about the cell as soon as a worker was attached once."""
        self.streams[stream.number] = stream
        if self.engine.model is not None:
            stream.send_cell_info()

    def disconnect(self, stream: ExchangeStream) -> None:
        """The end of a replica's stream is noticed."""
        if self.streams.pop(stream.number, None) is not None:
            self.on_event(ClientGone(stream.number))

    def on_event(self, event: Event) -> None:
        """Hand an event to the engine, watch what it says, and do it."""
        if not self.is_alive:
            return
        had_model = self.engine.model is not None
        now = self._clock.now
        actions = self.engine.on_event(event, now)
        self._watch.on_event(self.engine, event, actions, now)
        for action in actions:
            self._perform(action)
        if not had_model and self.engine.model is not None:
            for stream in self.streams.values():
                stream.send_cell_info()
        self._arm_timer()

    def on_request(self, stream: ExchangeStream, payload: bytes) -> None:
        """A message of a replica arrives."""
        if stream.number in self.streams:
            request = exchange_pb2.ExchangeRequest.FromString(payload)
            self.on_event(decode_request(stream.number, request))

    def on_answer(self, answer: Answer) -> None:
        """A step's answer arrives, perhaps one of an old epoch."""
        self._watch.on_answer(answer)
        self.on_event(StepReturned(decode_result(worker_pb2.StepResult.FromString(answer.payload))))

    def abort_request(self, request_id: str) -> None:
        """Somebody calls for the end of a request."""
        self.on_event(AbortRequest(request_id))

    def flush_prefix_cache(self) -> None:
        """Somebody calls for an empty prefix cache."""
        if self.is_alive:
            self.engine.flush_prefix_cache()

    def _perform(self, action: Action) -> None:
        match action:
            case SendStep(step):
                self.num_steps += 1
                self._link.send(encode_step(step).SerializeToString(), step.step_id)
            case Deliver(client, outputs):
                if client in self.streams:
                    self.streams[client].send_outputs(outputs)
            case CloseClient(client):
                if client in self.streams:
                    self.streams[client].break_()
            case DropWorker(epoch):
                self._link.drop(epoch)
            case Exit(reason):
                raise AssertionError(f"the engine wants to exit: {reason}")

    def _arm_timer(self) -> None:
        wakeup = self.engine.next_wakeup()
        if wakeup is None or (self._timer is not None and self._timer <= wakeup):
            return
        self._timer = wakeup
        self._clock.at(wakeup, lambda: self._on_timer(wakeup))

    def _on_timer(self, wakeup: float) -> None:
        if self._timer == wakeup:
            self._timer = None
            self.on_event(TimePassed())


class WorkerLink:
    """Plays WorkerClient: claims the worker above every epoch it heard of, again and again."""

    def __init__(
        self,
        process: SchedulerProcess,
        clock: Clock,
        rng: Random,
        mix: FaultMix,
        settings: CellSettings,
        worker: SimulatedWorker,
    ) -> None:
        self._process = process
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._settings = settings
        self._worker = worker
        self._epoch = 0
        self._stream: StepStream | None = None
        # By step id: answers that may still come when their epoch is over.
        self._old_answers: dict[int, Answer] = {}

    def attach(self) -> None:
        """Claim the worker."""
        if not self._process.is_alive:
            return
        self._epoch += 1
        epoch = self._epoch
        self._after_delay(lambda: self._worker.attach(epoch, lambda: self._open(epoch), self._on_refused))

    def send(self, payload: bytes, step_id: int) -> None:
        """Send a step. An answer to an old epoch's step of the same number may come first."""
        assert self._stream is not None
        self._stream.steps.send(payload)
        old = self._old_answers.pop(step_id, None)
        if old is not None and self._mix.strikes(Fault.RESULT_LATE, self._rng):
            self._after_delay(lambda: self._on_answer(old))

    def drop(self, epoch: int) -> None:
        """Break the stream of an epoch."""
        if self._stream is not None and self._stream.epoch == epoch:
            self._stream.break_()

    def fall_behind(self) -> None:
        """What is sent from now on arrives when another scheduler may have the worker."""
        if self._stream is not None:
            self._stream.steps.delay(self._rng.uniform(*_DETOUR_S))

    def close(self) -> None:
        """The process is gone."""
        if self._stream is not None:
            self._stream.break_()

    def _open(self, epoch: int) -> StepStream:
        """The worker is ours."""
        stream = StepStream(
            epoch,
            self._make_pipe(_STEP_TROUBLE, lambda payload: self._worker.on_step(stream, payload)),
            self._make_pipe(_RESULT_TROUBLE, self._on_answer),
            lambda: self._after_delay(lambda: self._on_lost(epoch)),
        )
        facts = WorkerFacts(
            epoch,
            "digest",
            CONTEXT_LENGTH,
            VOCABULARY,
            EOS_TOKEN_IDS,
            self._settings.num_blocks,
            num_draft_tokens=self._settings.num_draft_tokens,
            needs_all_tokens=self._settings.num_draft_tokens > 0,
        )
        self._after_delay(lambda: self._on_attached(stream, facts))
        return stream

    def _on_attached(self, stream: StepStream, facts: WorkerFacts) -> None:
        if not self._process.is_alive:
            stream.break_()
        elif stream.is_broken:
            self._on_refused(0)
        else:
            self._stream = stream
            self._process.on_event(WorkerAttached(facts))

    def _on_refused(self, epoch: int) -> None:
        self._epoch = max(self._epoch, epoch)
        self._clock.after(_RETRY_S, self.attach)

    def _on_lost(self, epoch: int) -> None:
        if self._stream is None or self._stream.epoch != epoch:
            return
        self._stream = None
        if self._process.is_zombie:
            # It was fenced: one that held the worker and meets a higher epoch exits.
            self._process.kill()
            return
        self._process.on_event(WorkerLost(epoch))
        self._clock.after(_RETRY_S, self.attach)

    def _on_answer(self, answer: Answer) -> None:
        self._old_answers[answer.step_id] = answer
        self._process.on_answer(answer)

    def _make_pipe(self, trouble: Trouble, deliver: Callable[[Message], None]) -> Pipe[Message]:
        return Pipe(self._clock, self._rng, self._mix, trouble, deliver=deliver, on_loss=lambda: None)

    def _after_delay(self, action: Callable[[], None]) -> None:
        self._clock.after(self._rng.uniform(*_DELAY_S), action)
