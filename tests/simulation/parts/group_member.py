"""A simulated member of a TP group: the real member code, without sockets and with a simulated device."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Protocol, cast

from typing_extensions import override

from lockstep.internal.v1 import worker_pb2
from services.worker.config import WorkerSettings
from services.worker.group.group_servicer import GroupServicer
from services.worker.group.meeting import Connect
from services.worker.group.member import Member
from services.worker.layout import RankLayout
from services.worker.process.device_loop import DeviceLoop, Launch
from services.worker.process.exits import DomainEnd, ExitCode
from services.worker.runner.cache_room import CacheRoom
from shared.step.step import Step, StepResult
from tests.simulation.faults import Fault, FaultMix
from tests.simulation.network.clock import Clock
from tests.simulation.network.join_stream import JoinStream, Life
from tests.simulation.parts.collective import Collective, MemberPart
from tests.simulation.parts.pause import Pause
from tests.simulation.watches.group_watch import GroupWatch

# The default of the setting.
SILENCE_S = 3.0
# Where ranks would connect to each other: here they share an object.
STORE = "127.0.0.1:1"
# A member often starts more slowly than its leader.
_LOADS_S = (0.0, 3.0)
_ATTACH_S = (0.0, 0.002)
# The ranks of a step finish it at about the same time.
_JITTER_S = (0.0, 0.003)
_HANGS_S = (12.0, 40.0, 700.0, math.inf)


class _Group(Protocol):
    """The part of the leader's group state that a member needs."""

    life: Life
    servicer: GroupServicer
    watch: GroupWatch

    @property
    def start_id(self) -> str: ...

    def num_blocks(self) -> int: ...


class _Facts:
    model_digest = "digest"


class PlayedRunner:
    """Plays the part of a `ModelRunner` that the group protocol and the device use."""

    facts = _Facts()
    numerics_fingerprint = "bits"
    progress = 0
    layout = RankLayout()

    def __init__(self, num_blocks: int) -> None:
        self.output: StepResult | None = None
        self.num_blocks = num_blocks

    @property
    def room(self) -> CacheRoom:
        """See `ModelRunner`."""
        return CacheRoom(self.num_blocks)

    def attach(self, **_: int) -> int:
        """See `ModelRunner`."""
        return self.num_blocks

    def launch(self, _: Step) -> PlayedStep:
        """See `ModelRunner`; the result is the output that came out of the collective."""
        assert self.output is not None
        return PlayedStep(self.output)


@dataclass(frozen=True)
class PlayedStep:
    """See `PendingStep`."""

    output: StepResult
    is_computed = True

    def finish(self) -> StepResult:
        """See `PendingStep`."""
        return self.output


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings that a member reads."""

    layout: RankLayout
    leader: str = "leader"
    meet_timeout_s: float = 300.0
    collective_host: str | None = None
    certificates: None = None
    silence_s: float = SILENCE_S
    fail_on_token: int | None = None


@dataclass(slots=True, eq=False)
class _Job:
    function: Callable[..., Any]
    argument: Any
    rest: tuple[Any, ...]
    future: Future[Any]


class _MemberDevice:
    """Plays `DeviceLoop`: runs each step together with the group's other devices."""

    is_stopping = False

    def __init__(
        self, member: SimulatedMember, runner: PlayedRunner, clock: Clock, rng: Random, mix: FaultMix, *, life: Life
    ) -> None:
        self._member = member
        self._runner = runner
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._life = life
        self._watch = member.group.watch
        self._jobs: deque[_Job] = deque()

    def put(self, job: Launch[Any]) -> Future[Any]:
        """See `DeviceLoop`."""
        assert isinstance(job.function, partial), "a launch of a step"
        launch, [step] = job.function.func, job.function.args
        return self.submit(lambda step: launch(step).finish(), step)

    def submit(self, function: Callable[..., Any], argument: Any, *rest: Any) -> Future[Any]:
        """See `DeviceLoop`."""
        if isinstance(argument, Step):
            self._watch.submit(self._tp_rank, (argument.epoch, argument.step_id))
        job = _Job(function, argument, rest, Future())
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._begin()
        return job.future

    @property
    def _tp_rank(self) -> int:
        return self._member.layout.tp_rank

    def _begin(self) -> None:
        job = self._jobs[0]
        if not isinstance(job.argument, Step):
            self._clock.after(self._rng.uniform(*_ATTACH_S), lambda: self._life.do(lambda: self._attach(job)))
            return
        self._watch.begin(self._tp_rank, (job.argument.epoch, job.argument.step_id))
        duration_s = self._rng.choice(_HANGS_S) if self._mix.strikes(Fault.MEMBER_HANG, self._rng) else 0.0
        part = MemberPart(duration_s, lambda output: self._on_output(job, output))
        self._member.collective.begin_as_member(self._member.layout.dp_rank, self._tp_rank, part)

    def _attach(self, job: _Job) -> None:
        self._watch.attach(self._tp_rank, job.argument.epoch)
        self._finish(job)

    def _on_output(self, job: _Job, output: StepResult) -> None:
        delay_s = self._rng.uniform(*_JITTER_S)
        self._clock.after(delay_s, lambda: self._life.do(lambda: self._return(job, output)))

    def _return(self, job: _Job, output: StepResult) -> None:
        self._watch.end(self._tp_rank)
        self._runner.output = output
        self._finish(job)

    def _finish(self, job: _Job) -> None:
        self._jobs.popleft()
        job.future.set_result(job.function(job.argument, *job.rest))
        if self._jobs:
            self._begin()


class _WatchedMember(Member):
    """A member that reports every message of its leader to the watch."""

    def __init__(self, settings: _Settings, device: _MemberDevice, end: DomainEnd, stream: JoinStream) -> None:
        connect = cast(Connect, lambda: stream)
        super().__init__(cast(WorkerSettings, settings), cast(DeviceLoop, device), end, connect)
        self._tp_rank = settings.layout.tp_rank
        self._watch = device._watch

    @override
    def take(self, message: worker_pb2.JoinResponse) -> None:
        if message.HasField("attach"):
            self._watch.fence(self._tp_rank, message.attach.epoch)
        else:
            self._watch.receive(self._tp_rank, message.step)
        super().take(message)


class SimulatedMember:
    """The process of a TP rank other than 0."""

    def __init__(
        self,
        layout: RankLayout,
        clock: Clock,
        rng: Random,
        mix: FaultMix,
        *,
        collective: Collective,
        group: _Group,
        end_domain: Callable[[SimulatedMember], None],
    ) -> None:
        self.layout = layout
        self.collective = collective
        self.group = group
        self.pause = Pause(clock)
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._end_domain = end_domain
        self._is_up = False

    def start_process(self) -> None:
        """Start the process, after its leader's; it joins once its weights are loaded."""
        self._is_up = True
        life = self.life = Life(self._clock, self.pause.when_over)
        answer = worker_pb2.MeetResponse(domain_start_id=self.group.start_id, store=STORE)
        self.stream = JoinStream(
            self._clock, self._rng, self._mix, self.group.life, life, answer=answer, handler=self.group.servicer.Join
        )
        runner = PlayedRunner(self.group.num_blocks())
        device = _MemberDevice(self, runner, self._clock, self._rng, self._mix, life=life)
        end = self._domain_end = DomainEnd(cast(DeviceLoop, device), self._on_end)
        member = _WatchedMember(_Settings(self.layout), device, end, self.stream)
        self._clock.after(self._rng.uniform(*_LOADS_S), lambda: life.do(lambda: _open(life, member, runner)))

    def end_process(self) -> None:
        """End the process and discard its state."""
        if self._is_up:
            self._is_up = False
            self.pause.end()
            self.life.end()
            self.stream.break_()

    def close(self) -> None:
        """Release everything at the end of the run."""
        self.life.close()

    def lose_leader(self) -> None:
        """Break the connection: the leader's process has ended."""
        if self._is_up:
            self.stream.break_()

    def leave(self) -> None:
        """Ask the process to end (SIGTERM)."""
        if self._is_up:
            self.life.do(lambda: self._domain_end.leave("asked to end"))

    def crash_after(self, delay_s: float) -> None:
        """Let the process crash after a delay."""
        life = self.life
        self._clock.after(delay_s, lambda: None if life.is_over else self._end_domain(self))

    def stop(self, duration_s: float) -> None:
        """Stop the process for this long (SIGSTOP)."""
        self.pause.extend(duration_s)
        self.collective.hold(self.pause.until)

    def _on_end(self, code: ExitCode, reason: str, **_: object) -> None:
        self.group.watch.leave(code, reason)
        self._end_domain(self)


def _open(life: Life, member: Member, runner: PlayedRunner) -> None:
    life.loop.create_task(_meet_and_open(member, runner)).add_done_callback(retrieve)


async def _meet_and_open(member: Member, runner: PlayedRunner) -> None:
    await member.meet()
    await member.open(cast(Any, runner))


def retrieve(task: asyncio.Task[None]) -> None:
    """Re-raise a task's exception, which ends the simulation."""
    if not task.cancelled():
        task.result()
