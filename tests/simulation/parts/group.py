"""The simulated TP group of a DP rank: the leader's real relay, and the state it keeps for its members."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, cast

from lockstep.internal.v1 import worker_pb2
from services.worker.group.group_servicer import GroupServicer
from services.worker.layout import RankLayout
from services.worker.parallel.rendezvous import Rendezvous
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.exits import DomainEnd, ExitCode
from services.worker.runner.cache_room import CacheRoom
from shared.step.step import StepResult
from tests.simulation.faults import Fault, FaultMix
from tests.simulation.network.clock import Clock
from tests.simulation.network.join_stream import NOTICE_S, Life
from tests.simulation.network.step_stream import Answer, StepStream
from tests.simulation.parts.collective import Collective
from tests.simulation.parts.group_member import SILENCE_S, STORE, PlayedRunner, SimulatedMember, retrieve
from tests.simulation.watches.group_watch import MAX_UNNOTICED_S, GroupWatch
from tests.simulation.workload import CellSettings

# From a process's start until its weights are loaded.
_LOADS_S = (0.0, 2.0)
_SOON_S = (0.0, 0.01)
_STOPS_S = (1.0, 2.0, 15.0, 50.0)
_SILENCES_S = (1.0, 2.0, 30.0)


class _LeaderDevice:
    """The part of a `DeviceLoop` that `DomainEnd` reads: the leader is never asked to stop."""

    is_stopping = False


class SimulatedGroup:
    """The leader's side of a TP group; for a rank with a single process every operation completes at once."""

    def __init__(
        self,
        rank: int,
        settings: CellSettings,
        clock: Clock,
        rng: Random,
        mix: FaultMix,
        *,
        collective: Collective,
        when_running: Callable[[Callable[[], object]], None],
        on_held: Callable[[], None],
        on_leaving: Callable[[], None],
        end_leader: Callable[[], None],
        end_member: Callable[[SimulatedMember], None],
    ) -> None:
        """Make a group whose processes are not started.

        Args:
            when_running: Runs an action in the leader's process.
            on_held: Called when all members hold the epoch relayed last.
            on_leaving: Called when a process of the group was asked to end, and the leader knows it.
            end_leader: Ends the leader's process, and with it the domain.
            end_member: Ends a member's process, and with it the domain.
        """
        self._rank = rank
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._mix = mix
        self._when_running = when_running
        self._on_held = on_held
        self._on_leaving = on_leaving
        self._end_leader = end_leader
        self._layout = RankLayout(dp_rank=rank, dp_size=settings.topology.dp_size, tp_size=settings.tp_size)
        self.members = [
            SimulatedMember(layout, clock, rng, mix, collective=collective, group=self, end_domain=end_member)
            for layout in sorted(self._layout.followers(), key=lambda layout: layout.tp_rank)
        ]
        self._num_starts = 0
        self._num_blocks = 0
        self._is_complete = False
        self._held_epoch = 0
        self._leader_stopped_until = 0.0
        self._answering: asyncio.Queue[tuple[StepResult, Answer]] | None = None
        self._answerer: asyncio.Task[None] | None = None

    @property
    def start_id(self) -> str:
        """The id of this start of the domain."""
        return str(self._num_starts)

    @property
    def is_open(self) -> bool:
        """Whether the leader accepts claims."""
        return not self.members or self._is_complete

    def num_blocks(self) -> int:
        """The number of KV blocks of each process."""
        return self._num_blocks

    def start(self, num_blocks: int) -> None:
        """Start the leader's process; it and its members have so many KV blocks."""
        self._num_blocks = num_blocks
        if not self.members:
            return
        self._num_starts += 1
        life = self.life = Life(self._clock, self._when_running)
        self.watch = GroupWatch(self._clock, self._settings.tp_size)
        end = self._domain_end = DomainEnd(cast(DeviceLoop, _LeaderDevice()), self._on_end)
        self.servicer = GroupServicer(self._layout, end, SILENCE_S)
        self.servicer.tell(Rendezvous(self.start_id, STORE))
        life.loop.create_task(self._wait_until_leaving(end)).add_done_callback(retrieve)
        self._clock.after(self._rng.uniform(*_LOADS_S), lambda: life.do(self._open))

    def end(self) -> None:
        """End the leader's process."""
        self._is_complete = False
        self._held_epoch = 0
        self._answering = self._answerer = None
        if self.members:
            self.life.end()
            for member in self.members:
                member.lose_leader()

    def close(self) -> None:
        """Release everything at the end of the run."""
        if self.members:
            self.life.close()

    def note_stop(self, until: float) -> None:
        """Record that the leader's process is stopped until then."""
        self._leader_stopped_until = until

    def leave(self) -> None:
        """Tell the members that the leader was asked to end."""
        if self.members:
            self.life.do(lambda: self._domain_end.leave("asked to end"))

    def fence(self, epoch: int) -> None:
        """Relay an epoch that the leader has accepted to the members."""
        if not self.members:
            return
        self.watch.fence(0, epoch)
        self._answering = None
        request = worker_pb2.AttachRequest(epoch=epoch, block_size=1, max_num_seqs=1, max_num_batched_tokens=1)
        with self.life.loop.running():
            relayed = asyncio.gather(*self.servicer.relay_attach(request))
        relayed.add_done_callback(lambda blocks: self._on_attached(epoch, blocks))

    def holds(self, epoch: int) -> bool:
        """Whether all members hold an epoch and have ended the one before."""
        return not self.members or self._held_epoch == epoch

    def check_acceptance(self, epoch: int) -> None:
        """Check that the leader may report that the group holds an epoch."""
        if self.members:
            self.watch.accept(epoch)

    def relay(self, request: worker_pb2.StepRequest) -> None:
        """Relay a step that the leader launches."""
        if not self.members:
            return
        self.watch.submit(0, (request.epoch, request.step_id))
        self.watch.send(request.SerializeToString())
        is_before = self._rng.random() < 0.5
        if is_before:
            self._disturb()
        self.servicer.relay_step(request)
        if not is_before:
            self._disturb()

    def begin(self, request: worker_pb2.StepRequest) -> None:
        """Record that the leader's device begins a step."""
        if self.members:
            self.watch.begin(0, (request.epoch, request.step_id))

    def open_stream(self, stream: StepStream) -> None:
        """Start answering the steps of an epoch on its stream."""
        if self.members:
            steps = self._answering = asyncio.Queue()
            self._answerer = self.life.loop.create_task(self._answer_all(stream, steps))
            self._answerer.add_done_callback(retrieve)

    def close_stream(self) -> None:
        """Stop answering: the stream has ended."""
        if self._answerer is not None:
            self._answerer.cancel()

    def answer(self, stream: StepStream, answer: Answer, output: StepResult | None) -> None:
        """Send a step's answer once the members agree with it, or at once if there are none."""
        if output is None:
            stream.answers.send(answer)
            return
        self.watch.end(0)
        if self._answering is not None:
            self._answering.put_nowait((output, answer))

    async def _answer_all(self, stream: StepStream, steps: asyncio.Queue[tuple[StepResult, Answer]]) -> None:
        # Answers of an epoch that was superseded meanwhile are lost: its stream is cut.
        while steps is self._answering:
            output, answer = await steps.get()
            await self.servicer.agree(output)
            self.watch.answer((output.epoch, output.step_id))
            stream.answers.send(answer)

    def _open(self) -> None:
        runner = PlayedRunner(self.num_blocks())
        opening = self.life.loop.create_task(self.servicer.open(cast(Any, runner)))
        opening.add_done_callback(self._on_complete)

    def _on_complete(self, opening: asyncio.Task[None]) -> None:
        opening.result()
        self._is_complete = True

    def _on_attached(self, epoch: int, blocks: asyncio.Future[list[CacheRoom]]) -> None:
        blocks.result()
        self._held_epoch = epoch
        self._on_held()

    def _on_end(self, code: ExitCode, reason: str, **_: object) -> None:
        self.watch.leave(code, reason)
        self._end_leader()

    async def _wait_until_leaving(self, end: DomainEnd) -> None:
        await end.leaving.wait()
        # Outside this loop: the scheduler, which has its own, hears of it at once.
        self._clock.after(0.0, self._on_leaving)

    def _disturb(self) -> None:
        member = self._rng.choice(self.members)
        if self._strikes(Fault.MEMBER_LEAVE):
            self._clock.after(self._draw_delay_s(), member.leave)
        if self._strikes(Fault.MEMBER_CRASH):
            member.crash_after(self._draw_delay_s())
        if self._strikes(Fault.MEMBER_LINK_BREAK):
            delay_s = self._draw_delay_s()
            self._clock.after(delay_s, member.stream.break_)
            self._expect_loss(member, delay_s + 2 * NOTICE_S[1])
        if self._strikes(Fault.MEMBER_LINK_SILENT):
            duration_s = self._rng.choice(_SILENCES_S)
            is_up_silent, is_down_silent = self._rng.choice([(True, False), (False, True), (True, True)])
            until = self._clock.now + duration_s
            member.stream.hold(until, is_up_silent=is_up_silent, is_down_silent=is_down_silent)
            if duration_s > MAX_UNNOTICED_S:
                self._expect_loss(member, MAX_UNNOTICED_S)
        if self._strikes(Fault.MEMBER_STOP):
            duration_s = self._rng.choice(_STOPS_S)
            member.stop(duration_s)
            if duration_s > MAX_UNNOTICED_S:
                self._expect_loss(member, MAX_UNNOTICED_S, may_be_stopped_until=member.pause.until)

    def _draw_delay_s(self) -> float:
        """The delay of a fault: none, which is before the step in transit arrives, or a short one."""
        return self._rng.choice([0.0, self._rng.uniform(*_SOON_S)])

    def _expect_loss(self, member: SimulatedMember, within_s: float, *, may_be_stopped_until: float = 0.0) -> None:
        """Check that the leader or the member ends in time, unless one of them is stopped meanwhile.

        Args:
            within_s: How soon one of them has to end.
            may_be_stopped_until: A stop of the member up to this time is no excuse: the leader has to notice it.
        """
        since, lives = self._clock.now, (self.life, member.life)

        def check() -> None:
            if any(life.is_over for life in lives):
                return
            is_member_excused = member.pause.until > max(since, may_be_stopped_until)
            is_excused = self._leader_stopped_until > since or is_member_excused
            assert is_excused, "a process of a group is lost unnoticed"

        self._clock.after(within_s, check)

    def _strikes(self, fault: Fault) -> bool:
        return self._mix.strikes(fault, self._rng)
