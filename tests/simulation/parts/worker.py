"""The simulated leader of one DP rank: the real claim ledger and a simulated device that runs steps in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import numpy as np

from lockstep.internal.v1 import worker_pb2
from services.scheduler.cell.domains.attach_events import Accepted, GroupPlace, Refused
from services.worker.server.claim import NOTHING_ADMITTED, AdmittedStep, ClaimLedger
from services.worker.server.departure import Departure
from shared.errors import NotReadyError, ServiceError
from shared.ids import DpRank
from shared.request.limits import TOKEN_DTYPE
from shared.step.step import StepResult
from tests.simulation.faults import Fault, FaultMix
from tests.simulation.network.clock import Clock
from tests.simulation.network.step_stream import NO_HOLDER, Answer, Holder, StepStream
from tests.simulation.network.virtual_loop import VirtualLoop
from tests.simulation.parts.collective import Collective, Part, num_prompt_tokens_of
from tests.simulation.parts.group import SimulatedGroup
from tests.simulation.parts.pause import Pause
from tests.simulation.workload import CellSettings
from tests.support.scheduler.cell_model import VOCABULARY, Oracle, PoisonedError, WorkerModel

_STEP_S = 0.004
_TOKEN_S = 0.00002
_SLOWNESS = 30.0
_HANGS_S = (12.0, 40.0, 700.0, math.inf)
_LONG_STEPS_S = (15.0, 60.0)
_STOPS_S = (1.0, 5.0, 15.0, 50.0)
_SILENCES_S = (1.0, 5.0, 30.0)
_NOTICE_S = (0.0, 2.0)
# Rarer than real heartbeats, which keeps the number of events low, but often enough for the scheduler.
_HEARTBEATS_S = (0.5, 2.5)
_SHARE_OF_SECOND_SIGNALS = 0.3
_SECOND_SIGNALS_S = (0.0, 0.3)
# A sick worker dies at every so-manieth step since its start, for so long.
_SICK_EVERY = (1, 2, 3, 5, 9, 20)
_SICK_S = (1.0, 20.0)
# A coupled rank that is silent for this long ends its domain.
_DOMAIN_SILENCE_S = 3.0
# An `Attach` that finds a launched step unanswered for this long reports the worker as stuck.
_STUCK_AFTER_S = 10.0

OfferAnswer = Callable[[Accepted | Refused], None]


def _ignore() -> None:
    pass


def duration_of_step_s(num_prompt_tokens: int) -> float:
    """How long the device takes for a step with this many prompt tokens."""
    return _STEP_S + _TOKEN_S * num_prompt_tokens


@dataclass(slots=True, eq=False)
class _Launch:
    """A step given to the device: the stream it came on and the KV cells (`model`) it runs on."""

    stream: StepStream
    model: WorkerModel
    request: worker_pb2.StepRequest
    answer: Answer | None = None
    output: StepResult | None = None
    """What the step sampled, if it has group members that must sample the same; else None."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """An offered epoch that is answered once all steps launched before have returned."""

    epoch: int
    last_step: AdmittedStep
    answer: OfferAnswer


class SimulatedWorker:
    """Serves one epoch at a time and refuses older ones; when its process ends, its whole failure domain ends.

    Invariant: only the steps of an epoch write its KV cells, in the order of their numbers.
    """

    def __init__(
        self,
        rank: DpRank,
        settings: CellSettings,
        clock: Clock,
        rng: Random,
        mix: FaultMix,
        *,
        collective: Collective,
        oracle: Oracle,
        end_domain: Callable[[Any], None],
        on_leaving: Callable[[], None],
    ) -> None:
        self.num_attaches = 0
        self.num_computed_dummies = 0
        self._rank = rank
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._collective = collective
        self._oracle = oracle
        self._end_domain: Callable[[], None] = partial(end_domain, self)
        self._on_leaving = on_leaving
        self._is_up = False
        self._num_starts = 0
        self._num_blocks = 0
        self._weights_digest = ""
        self._is_asked = False
        self._on_stay_over: Callable[[], None] = _ignore
        self._hears_staying = False
        # The abstract methods for sockets and processes are not implemented.
        self._loop = VirtualLoop(  # type: ignore[abstract]
            clock, lambda action: self.when_running(lambda: self._loop.run_once(action)), lambda when: when
        )
        self._pause = Pause(clock)
        self._claim = ClaimLedger()
        self._departure = self._make_departure()
        # The highest epoch fenced in this process: no older step may be launched.
        self._fence = 0
        self._model: WorkerModel | None = None
        self._stream: StepStream | None = None
        self._offer: _Offer | None = None
        self._launched: deque[_Launch] = deque()
        self._progress = 0
        # Across processes: until when, and at which steps of a process. 0 for none.
        self._sick_until = self._sick_attach_until = -math.inf
        self._sick_every = 0
        self._num_steps = 0
        self.num_sick_deaths = 0
        self.group = SimulatedGroup(
            rank,
            settings,
            clock,
            rng,
            mix,
            collective=collective,
            when_running=self.when_running,
            on_held=self._accept_if_held,
            on_leaving=self.leave,
            end_leader=self._end_domain,
            end_member=end_domain,
        )

    def offer(self, epoch: int, instance_id: str, answer: OfferAnswer) -> None:
        """Handle `Attach`; it is answered once all launched steps have returned, or as stuck after `_STUCK_AFTER_S`."""
        if not self._is_up or not self.group.is_open:
            answer(Refused(self._rank, epoch, "NOT_READY", 0, is_ready=False))
            return
        before = self._claim.last_admitted
        try:
            self._claim.offer(epoch, instance_id, self._clock.now)
        except ServiceError as error:
            is_ready = not isinstance(error, NotReadyError)
            holder = self._holder() if is_ready else NO_HOLDER
            answer(Refused(self._rank, epoch, error.reason, holder.epoch, holder.instance_id, is_ready=is_ready))
            return
        assert not self._departure.leaving.is_set(), "a group that is leaving is claimed"
        self._departure.note_claim(self._settings.policy.drain_s, says_last_word=True)
        self._fence = epoch
        self._supersede()
        offer = self._offer = _Offer(epoch, before, answer)
        self.group.fence(epoch)
        self._accept_if_held()
        # If no step was ever admitted, none can be stuck.
        if self._offer is offer and before != NOTHING_ADMITTED:
            self._clock.after(_STUCK_AFTER_S, lambda: self._accept(offer, is_stuck=True))

    def open(self, stream: StepStream) -> bool:
        """Handle `Execute`; returns whether the stream is accepted."""
        if not self._is_up or self._model is None:
            stream.break_()
            return False
        if not self._hear(stream):
            return False
        self.num_attaches += 1
        self._stream = stream
        self._hears_staying = False
        self._depart(lambda departure: departure.hear(is_staying=False, is_last=False))
        self.group.open_stream(stream)
        self._beat(stream)
        return True

    def on_close(self, stream: StepStream, *, is_last: bool = False) -> None:
        """Handle the end of a stream, by the scheduler, perhaps after a last word, or by a broken link."""
        self._claim.end_stream(stream.number)
        if stream is self._stream:
            self.group.close_stream()
            if is_last:
                self._depart(lambda departure: departure.hear(is_staying=False, is_last=True))
            self._depart(Departure.lose_stream)

    def on_step(self, stream: StepStream, payload: bytes) -> None:
        """Handle a step from the scheduler."""
        request = worker_pb2.StepRequest.FromString(payload)
        if not self._is_up or self._model is None:
            stream.break_()
            return
        try:
            self._claim.admit(stream.number, request.epoch, request.step_id, self._clock.now)
        except ServiceError:
            self._claim.end_stream(stream.number)
            stream.break_(self._holder())
            return
        assert request.epoch >= self._fence, "a step older than the fence is launched"
        if request.graph_batch_size:
            sizes = self._settings.graph_batch_sizes(self._rank)
            assert request.graph_batch_size in sizes, "a rank is to run a graph that it does not have"
        self.group.relay(request)
        self._launched.append(_Launch(stream, self._model, request))
        if len(self._launched) == 1:
            self._begin()
        self._disturb(stream)

    def on_heartbeat(self, stream: StepStream, *, is_staying: bool) -> None:
        """Handle a heartbeat of the scheduler."""
        if not stream.is_broken and not stream.steps.is_held and not self.is_stopped and stream is self._stream:
            self._hear(stream)
            if is_staying != self._hears_staying:
                self._hears_staying = is_staying
                self._depart(lambda departure: departure.hear(is_staying=is_staying, is_last=False))

    def restart(self, epoch: int, instance_id: str) -> None:
        """Handle `Restart`."""
        try:
            self._claim.check_restart(epoch, instance_id)
        except ServiceError:
            return
        self._end_domain()

    def leave(self, on_stay_over: Callable[[], None] = _ignore) -> None:
        """Ask the process to end (SIGTERM), or tell it that another process of the domain was asked.

        `on_stay_over` is called when it stays no longer.
        """
        self.when_running(lambda: self._ask(on_stay_over))

    def end_process(self) -> None:
        """End the process and discard its state."""
        if not self._is_up:
            return
        self._is_up = self._is_asked = False
        self._on_stay_over = _ignore
        self._pause.end()
        self._launched.clear()
        self._model = self._offer = None
        self._claim = ClaimLedger()
        self._departure = self._make_departure()
        self._fence = 0
        self._break_stream()
        self.group.end()

    def start_process(self) -> None:
        """Start a process with empty KV cells."""
        self._num_steps = 0
        self._is_up = True
        self._weights_digest = self._settings.model.weights_digest
        self._num_starts += 1
        self._num_blocks = self._settings.pool_of(self._rank, self._num_starts)
        self.group.start(self._num_blocks)

    def close(self) -> None:
        """Release everything at the end of the run."""
        self._loop.close()
        self.group.close()

    @property
    def is_held(self) -> bool:
        """Whether a scheduler has a stream to the group."""
        return self._stream is not None

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP)."""
        return self._pause.is_on

    def when_running(self, action: Callable[[], object]) -> None:
        """Run `action` in the process: now, or when it is continued (SIGCONT); never if it ends before."""
        self._pause.when_over(action)

    def _depart(self, action: Callable[[Departure], None]) -> None:
        """Tell the process's departure something, in its own loop: a scheduler has another one."""
        departure = self._departure

        def act() -> None:
            if departure is self._departure:
                self._loop.run_once(lambda: action(departure))

        self._clock.after(0.0, lambda: self.when_running(act))

    def _ask(self, on_stay_over: Callable[[], None]) -> None:
        if not self._is_up or self._is_asked:
            return
        self._is_asked = True
        self._on_stay_over = on_stay_over
        self.group.leave()
        self._on_leaving()
        departure = self._departure
        self._loop.create_task(self._say_leaving(departure))
        self._depart(Departure.ask)

    async def _say_leaving(self, departure: Departure) -> None:
        """Say at once that the group leaves. Having stayed for another scheduler, it says so in heartbeats only."""

        def say() -> None:
            if departure is self._departure and departure.leaving.is_set():
                self._on_stay_over()
                self._beat_leaving()

        await departure.leaving.wait()
        # Not in this task: the scheduler's loop hears of it at once, and a failed check must end the simulation.
        self._clock.after(0.0, lambda: self.when_running(say))

    def _beat_leaving(self) -> None:
        if self._stream is None or self._stream.is_broken:
            return
        self._stream.beat(self._progress, is_leaving=True)
        # After a first step the scheduler has certainly taken in the heartbeat above.
        if self._claim.next_step_id > 1 and self._rng.random() < _SHARE_OF_SECOND_SIGNALS:
            self._clock.after(self._rng.uniform(*_SECOND_SIGNALS_S), partial(self._end_as_asked, self._departure))

    def _make_departure(self) -> Departure:
        def end(_: str) -> None:
            self._clock.after(0.0, lambda: self._end_as_asked(departure))

        departure = Departure(self._claim, end)
        return departure

    def _end_as_asked(self, departure: Departure) -> None:
        if departure is self._departure:
            # It may end without having said that it leaves.
            self._on_stay_over()
            self._end_domain()

    def _disturb(self, stream: StepStream) -> None:
        if self._strikes(Fault.WORKER_LEAVE):
            self._clock.after(self._rng.uniform(0.0, 0.1), self.leave)
        if self._strikes(Fault.WORKER_CRASH):
            self._end_domain()
        # Once: a request that two sicknesses strike, each as it begins, is taken for their cause.
        if not self._sick_every and self._strikes(Fault.WORKER_SICK):
            self._sick_until = self._clock.now + self._rng.uniform(*_SICK_S)
            self._sick_every = self._rng.choice(_SICK_EVERY)
        if self._strikes(Fault.ATTACH_SICK):
            # From the next attach on, whatever brings it.
            self._sick_attach_until = self._clock.now + self._rng.uniform(*_SICK_S)
        if self._strikes(Fault.LINK_BREAK):
            self._clock.after(self._rng.uniform(0.0, 0.1), stream.break_)
            self._clock.after(self._rng.uniform(*_NOTICE_S), lambda: self.on_close(stream))
        if self._strikes(Fault.LINK_SILENT):
            until = self._clock.now + self._rng.choice(_SILENCES_S)
            is_deaf, is_mute = self._rng.choice([(True, False), (False, True), (True, True)])
            if is_deaf:
                stream.steps.hold(until)
            if is_mute:
                stream.answers.hold(until)
        if self._strikes(Fault.WORKER_STOP):
            self._stop(stream, self._rng.choice(_STOPS_S))

    def _stop(self, stream: StepStream, duration_s: float) -> None:
        self._pause.extend(duration_s)
        until = self._pause.until
        stream.answers.hold(until)
        self._collective.hold(until)
        self.group.note_stop(until)
        patience_s = _DOMAIN_SILENCE_S if self._settings.topology.is_coupled else self._settings.health_kill_s
        if duration_s > patience_s:
            self._clock.after(patience_s, lambda: self._give_up(until))

    def _give_up(self, until: float) -> None:
        """End the stopped process, as the launcher or a coupled rank does after its timeout."""
        if self._pause.until == until:
            self._end_domain()

    def _accept_if_held(self) -> None:
        """Answer the pending offer if all steps launched before it have returned on all processes of the group."""
        offer = self._offer
        if offer is not None and not self._launched and self.group.holds(offer.epoch):
            self._accept(offer)

    def _accept(self, offer: _Offer, *, is_stuck: bool = False) -> None:
        if offer is not self._offer:
            return
        self._offer = None
        if self._is_sick(Fault.ATTACH_SICK, self._sick_attach_until):
            offer.answer(Refused(self._rank, offer.epoch, "INTERNAL"))
            self._die_of_sickness()
            return
        if not is_stuck:
            self.group.check_acceptance(offer.epoch)
            self._model = WorkerModel(
                self._settings.batch_limits(self._rank, self._num_blocks),
                may_spoil=lambda: self._strikes(Fault.NOT_FINITE),
                proposer=self._oracle,
                num_draft_tokens=self._settings.num_draft_tokens,
                poison=self._settings.poison,
            )
        topology = self._settings.topology
        place = GroupPlace(self._rank, topology.dp_size, self._settings.tp_size, topology.is_coupled)
        if topology.is_dynamic:
            place = GroupPlace(None, 1, self._settings.tp_size, is_coupled=False)
        facts = self._settings.worker_facts(offer.epoch, self._rank, self._num_blocks)
        facts = replace(facts, weights_digest=self._weights_digest)
        offer.answer(Accepted(self._rank, offer.epoch, facts, place, offer.last_step, is_stuck))

    def _supersede(self) -> None:
        """Discard the state of the previous claim: its KV cells, its pending offer and its stream."""
        self._model = None
        if self._offer is not None:
            holder = self._holder()
            self._offer.answer(Refused(self._rank, self._offer.epoch, "STALE_EPOCH", holder.epoch, holder.instance_id))
            self._offer = None
        self._break_stream(self._holder())

    def _break_stream(self, holder: Holder = NO_HOLDER) -> None:
        """End the current stream; steps that its scheduler sends before it notices are refused."""
        stream, self._stream = self._stream, None
        if stream is not None:
            self._depart(Departure.lose_stream)
            stream.answers.cut()
            self._clock.after(self._rng.uniform(*_NOTICE_S), lambda: stream.break_(holder))

    def _hear(self, stream: StepStream) -> bool:
        try:
            self._claim.on_heartbeat(stream.number, stream.claimed.epoch, stream.claimed.instance_id, self._clock.now)
        except ServiceError:
            stream.break_(self._holder())
            return False
        return True

    def _holder(self) -> Holder:
        return Holder(self._claim.epoch, self._claim.live_holder(self._clock.now))

    def _begin(self) -> None:
        launch = self._launched[0]
        self.group.begin(launch.request)
        self._num_steps += 1
        if self._is_sick(Fault.WORKER_SICK, self._sick_until) and not self._num_steps % self._sick_every:
            self._die_of_sickness()
            return
        try:
            result = launch.model.answer(launch.request)
        except PoisonedError:
            self._clock.after(self._rng.uniform(0.0, _STEP_S), lambda: self._die_of(launch))
            return
        is_nonsense = self._strikes(Fault.RESULT_NONSENSE)
        if is_nonsense:
            _make_nonsense(result, self._rng)
        launch.answer = Answer(
            self._rank,
            launch.request.epoch,
            launch.request.step_id,
            result.SerializeToString(),
            list(launch.model.last_spoilers),
            is_nonsense,
        )
        if self.group.members:
            launch.output = _output_of(result)
        self.num_computed_dummies += launch.request.is_dummy
        duration_s, progress_s = self._draw_duration_s(launch.request)
        part = Part(
            launch.request,
            launch.model.last_num_tokens,
            launch.output,
            duration_s,
            progress_s,
            lambda: self._on_end(launch),
        )
        self._collective.begin(self._rank, part)

    def _is_sick(self, fault: Fault, until: float) -> bool:
        """Faults have ceased when the mix has none."""
        return self._clock.now < until and fault in self._mix.rates

    def _die_of_sickness(self) -> None:
        if self._is_up:
            self.num_sick_deaths += 1
            self._end_domain()

    def _die_of(self, launch: _Launch) -> None:
        if self._is_running(launch):
            self._end_domain()

    def _draw_duration_s(self, request: worker_pb2.StepRequest) -> tuple[float, float]:
        """How long the device takes (may be inf if it hangs), and for how long it reports progress."""
        duration_s = duration_of_step_s(num_prompt_tokens_of(request))
        if self._strikes(Fault.WORKER_SLOW):
            duration_s *= _SLOWNESS
        duration_s *= self._rng.uniform(0.9, 1.1)
        if self._strikes(Fault.LONG_STEP):
            duration_s += self._rng.uniform(*_LONG_STEPS_S)
        progress_s = duration_s
        if self._strikes(Fault.WORKER_HANG):
            duration_s += self._rng.choice(_HANGS_S)
        return duration_s, progress_s

    def _beat(self, stream: StepStream) -> None:
        """Send heartbeats until the stream ends; they report progress while a long step is running."""
        if stream is not self._stream or stream.is_broken:
            return
        if not self.is_stopped:
            self._progress += bool(self._launched) and self._collective.gets_on
            stream.beat(self._progress, is_leaving=self._departure.leaving.is_set())
        delay_s = self._rng.uniform(*_HEARTBEATS_S)
        self._clock.after(delay_s, lambda: self._beat(stream), is_background=True)

    def _on_end(self, launch: _Launch) -> None:
        self.when_running(lambda: self._return(launch))

    def _return(self, launch: _Launch) -> None:
        if not self._is_running(launch):
            return
        assert launch.answer is not None
        self._launched.popleft()
        self._progress += 1
        self.group.answer(launch.stream, launch.answer, launch.output)
        if self._launched:
            self._begin()
        else:
            self._accept_if_held()

    def _is_running(self, launch: _Launch) -> bool:
        return bool(self._launched) and self._launched[0] is launch

    def _strikes(self, fault: Fault) -> bool:
        return self._mix.strikes(fault, self._rng)


def _output_of(result: worker_pb2.StepResult) -> StepResult:
    return StepResult(
        result.epoch,
        result.step_id,
        np.frombuffer(result.token_ids, TOKEN_DTYPE),
        np.frombuffer(result.not_finite_rows, TOKEN_DTYPE),
        0,
        counts=np.frombuffer(result.counts, TOKEN_DTYPE) if result.HasField("counts") else None,
    )


def _make_nonsense(result: worker_pb2.StepResult, rng: Random) -> None:
    tokens = np.frombuffer(result.token_ids, TOKEN_DTYPE).tolist()
    counts = np.frombuffer(result.counts, TOKEN_DTYPE).tolist() if result.HasField("counts") else [1] * len(tokens)
    match rng.randrange(4):
        case 0:
            tokens.append(0)
        case 1 if tokens:
            tokens[rng.randrange(len(tokens))] = rng.choice([-1, VOCABULARY])
        case 2:
            result.counts = np.array([*counts, 1], TOKEN_DTYPE).tobytes()
        case _:
            result.not_finite_rows = np.array([len(counts)], TOKEN_DTYPE).tobytes()
    result.token_ids = np.array(tokens, TOKEN_DTYPE).tobytes()
