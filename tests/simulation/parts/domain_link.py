"""The simulated scheduler's link to one failure domain: the real attach protocol over simulated streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

from services.scheduler.cell.domains.attach import DomainAttach
from services.scheduler.cell.domains.attach_events import (
    Accepted,
    AttachEvent,
    CloseStreams,
    Command,
    Dropped,
    Offer,
    OpenStreams,
    Refused,
    Restart,
    RetryAt,
    RetryDue,
    StreamBroken,
    StreamOpened,
)
from services.scheduler.cell.domains.scheduler_claim import OFFER_TIMEOUT_S, SchedulerClaim
from services.scheduler.cell.events import DomainAttached, DomainLost, Event, Exit, RankHeartbeat
from services.scheduler.core.batch.step import Step
from shared.ids import DpRank
from shared.step.codec import encode_step
from tests.simulation.faults import Fault, FaultMix
from tests.simulation.network.clock import Clock
from tests.simulation.network.network import Message, Pipe, Trouble
from tests.simulation.network.step_stream import NO_HOLDER, Answer, Holder, StepStream, StreamEnds
from tests.simulation.parts.domain import SimulatedDomain
from tests.simulation.workload import CellSettings

_DELAY_S = (0.0002, 0.002)
_DETOUR_S = (0.0, 4.0)
_STEP_TROUBLE = Trouble(Fault.STEP_LOST, Fault.STEP_REPEATED, late=Fault.STEP_LATE)
_RESULT_TROUBLE = Trouble(Fault.RESULT_LOST, Fault.RESULT_REPEATED, Fault.RESULT_REORDERED, Fault.RESULT_LATE)


class Process(Protocol):
    """The part of a scheduler's process that its links use."""

    instance_id: str

    def when_running(self, action: Callable[[], None]) -> None: ...

    def on_answer(self, answer: Answer) -> None: ...


class DomainLink:
    """Plays `DomainClient`: carries out the commands of the attach protocol, and carries steps and answers."""

    _num_streams = 0

    def __init__(
        self,
        domain: int,
        process: Process,
        claim: SchedulerClaim,
        settings: CellSettings,
        clock: Clock,
        rng: Random,
        *,
        mix: FaultMix,
        workers: SimulatedDomain,
        on_event: Callable[[Event], None],
        on_exit: Callable[[Exit], None],
    ) -> None:
        self._process = process
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._workers = workers.workers
        self._tell_engine = on_event
        self._on_exit = on_exit
        self._attach = DomainAttach(domain, settings.topology, claim)
        self._streams: dict[DpRank, StepStream] = {}
        self._is_closed = False
        # By rank and step id: answers that may be delivered again after their epoch has ended.
        self._old_answers: dict[tuple[DpRank, int], Answer] = {}

    async def run(self) -> None:
        """Keep the domain attached until cancelled."""
        try:
            self._on_event(RetryDue())
            await asyncio.Event().wait()
        finally:
            self.close()

    def send(self, rank: DpRank, step: Step) -> None:
        """Send a step. An old epoch's answer with the same step id may arrive first."""
        if self._is_closed:
            return
        self._streams[rank].steps.send(encode_step(step).SerializeToString())
        old = self._old_answers.pop((rank, step.step_id), None)
        if old is not None and self._mix.strikes(Fault.RESULT_LATE, self._rng):
            self._after_delay(lambda: self._on_answer(old))

    def beat(self, _progress: int, *, is_staying: bool) -> None:
        """Send a heartbeat to every rank."""
        for rank, stream in self._streams.items():
            self._workers[rank].on_heartbeat(stream, is_staying=is_staying)

    def drop(self, epoch: int, retry_s: float | None) -> None:
        """Drop an epoch on behalf of the engine."""
        self._on_event(Dropped(epoch, retry_s))

    def release(self, epoch: int) -> None:
        """Drop an epoch whose workers were drained."""
        self._on_event(Dropped(epoch, is_released=True))

    async def say_last_word(self) -> None:
        """Tell the workers that no scheduler needs them any more."""
        self._close_streams(is_last=True)

    def delay_steps(self) -> None:
        """Delay the steps sent from now on, so that another scheduler may hold the workers when they arrive."""
        for stream in self._streams.values():
            stream.steps.delay(self._rng.uniform(*_DETOUR_S))

    def end(self) -> None:
        """The workers are not there any more."""
        self._attach.end()
        self.close()

    def close(self) -> None:
        """Close the links, or lose them with their process."""
        self._is_closed = True
        self._close_streams()

    def _on_event(self, event: AttachEvent) -> None:
        if not self._is_closed:
            for command in self._attach.on_event(event, self._clock.now):
                self._perform(command)

    def _hear(self, event: AttachEvent) -> None:
        """Handle an event from a worker: now, or when the process is continued."""
        self._process.when_running(lambda: self._on_event(event))

    def _perform(self, command: Command) -> None:
        match command:
            case Offer(group, epoch):
                self._offer(DpRank(group), epoch)
            case Restart(group, epoch):
                self._restart(DpRank(group), epoch)
            case OpenStreams(epoch):
                self._streams = {rank: self._make_stream(rank, epoch) for rank in self._workers}
                for rank, stream in self._streams.items():
                    self._send(rank, partial(self._open, rank, stream))
            case CloseStreams(is_last=is_last):
                self._close_streams(is_last=is_last)
            case RetryAt(when):
                self._clock.at(when, lambda: self._hear(RetryDue()))
            case DomainAttached() | DomainLost():
                self._tell_engine(command)
            case Exit():
                self._on_exit(command)

    def _restart(self, rank: DpRank, epoch: int) -> None:
        self._send(rank, lambda: self._workers[rank].restart(epoch, self._process.instance_id))

    def _offer(self, rank: DpRank, epoch: int) -> None:
        answered: list[Accepted | Refused] = []

        def answer(event: Accepted | Refused) -> None:
            if not answered:
                answered.append(event)
                self._hear(event)

        offer = partial(
            self._workers[rank].offer,
            epoch,
            self._process.instance_id,
            lambda event: self._after_delay(lambda: answer(event)),
        )
        self._send(rank, offer)
        self._clock.after(OFFER_TIMEOUT_S, lambda: answer(Refused(rank, epoch, "no answer")))

    def _open(self, rank: DpRank, stream: StepStream) -> None:
        if not stream.is_broken and self._workers[rank].open(stream):
            self._after_delay(lambda: self._hear(StreamOpened(rank, stream.claimed.epoch)))

    def _close_streams(self, *, is_last: bool = False) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close(is_last=is_last)

    def _make_stream(self, rank: DpRank, epoch: int) -> StepStream:
        DomainLink._num_streams += 1
        worker = self._workers[rank]
        steps: Pipe[bytes] = self._make_pipe(
            _STEP_TROUBLE, lambda payload: worker.when_running(lambda: worker.on_step(stream, payload))
        )
        ends = StreamEnds(
            on_beat=lambda progress, is_leaving: self._process.when_running(
                lambda: self._tell_engine(RankHeartbeat(rank, epoch, progress, is_leaving))
            ),
            on_broken=lambda holder: self._after_delay(lambda: self._hear(_broken(rank, epoch, holder))),
            on_closed=lambda is_last: self._send(rank, lambda: worker.on_close(stream, is_last=is_last)),
        )
        answers: Pipe[Answer] = self._make_pipe(
            _RESULT_TROUBLE, lambda answer: self._process.when_running(lambda: self._on_answer(answer))
        )
        claimed = Holder(epoch, self._process.instance_id)
        stream = StepStream(DomainLink._num_streams, claimed, ends, steps=steps, answers=answers)
        return stream

    def _on_answer(self, answer: Answer) -> None:
        if not self._is_closed:
            self._old_answers[answer.rank, answer.step_id] = answer
            self._process.on_answer(answer)

    def _make_pipe(self, trouble: Trouble, deliver: Callable[[Message], None]) -> Pipe[Message]:
        return Pipe(self._clock, self._rng, self._mix, trouble, deliver=deliver, on_loss=lambda: None)

    def _send(self, rank: DpRank, action: Callable[[], None]) -> None:
        """Run `action` in a worker's process after a delay, and once that process is not stopped."""
        self._after_delay(lambda: self._workers[rank].when_running(action))

    def _after_delay(self, action: Callable[[], None]) -> None:
        self._clock.after(self._rng.uniform(*_DELAY_S), action)


def _broken(rank: DpRank, epoch: int, holder: Holder) -> StreamBroken:
    return StreamBroken(rank, epoch, None if holder is NO_HOLDER else holder.epoch, holder.instance_id)
