"""Device time of a failure domain: a step runs on all of its processes together, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.internal.v1 import worker_pb2
from shared.ids import DpRank
from shared.request.limits import TOKEN_DTYPE
from shared.step.step import StepResult
from tests.simulation.network.clock import Clock

_HANG_S = 100.0


@dataclass(frozen=True, slots=True)
class Part:
    """A leader's part of a step that its device has begun."""

    request: worker_pb2.StepRequest
    num_tokens: int
    output: StepResult | None
    """What it samples, if it has group members that must sample the same; else None."""
    duration_s: float
    """How long it would take alone; inf if it hangs forever."""
    progress_s: float
    """How long its process reports progress, and with it all ranks, since they synchronize in every layer."""
    on_end: Callable[[], None]


@dataclass(frozen=True, slots=True)
class MemberPart:
    """A member's part of its group's step; `on_end` receives what the group sampled."""

    duration_s: float
    on_end: Callable[[StepResult], None]


class Collective:
    """Ends the parts of a step together, once every process of the domain has begun its own.

    A leader that begins a step while another waits in a different one is a deadlock, and so are parts that disagree on
    what their collectives carry. `GroupWatch` checks that the processes of one group run the same steps.

        rank 0  |--step 1--........|--step 2----|
        rank 1        |--step 1---|--step 2--..|     `.` waiting for the slowest part
    """

    def __init__(self, clock: Clock, ranks: Sequence[DpRank], tp_size: int) -> None:
        self._clock = clock
        self._ranks = ranks
        self._num_members = len(ranks) * (tp_size - 1)
        self._waiting: dict[int, Part] = {}
        # By DP rank and TP rank.
        self._waiting_members: dict[tuple[int, int], MemberPart] = {}
        self._held_until = 0.0
        self._progresses_until = 0.0
        # Counts restarts of the processes; parts begun in an earlier generation never end.
        self._generation = 0

    def begin(self, rank: int, part: Part) -> None:
        """Begin a leader's part of a step; a device runs one step at a time."""
        assert rank not in self._waiting, "a device begins a step during another"
        self._waiting[rank] = part
        if len(self._ranks) > 1:
            self._check_agreement(rank, part)
        self._run_if_complete()

    def begin_as_member(self, rank: int, tp_rank: int, part: MemberPart) -> None:
        """Begin a member's part of its rank's step."""
        assert (rank, tp_rank) not in self._waiting_members, "a device begins a step during another"
        self._waiting_members[rank, tp_rank] = part
        self._run_if_complete()

    @property
    def gets_on(self) -> bool:
        """Whether the ranks report progress in the running step."""
        return self._clock.now < self._progresses_until

    def hold(self, until: float) -> None:
        """End no step on any rank before `until`, because the process of a rank is stopped."""
        self._held_until = max(self._held_until, until)

    def reset(self) -> None:
        """Discard all parts: the domain's processes have ended."""
        self._waiting.clear()
        self._waiting_members.clear()
        self._held_until = self._progresses_until = 0.0
        self._generation += 1

    def _run_if_complete(self) -> None:
        if len(self._waiting) < len(self._ranks) or len(self._waiting_members) < self._num_members:
            return
        parts, self._waiting = self._waiting, {}
        members, self._waiting_members = self._waiting_members, {}
        duration_s = max(part.duration_s for part in parts.values())
        duration_s = max([duration_s, *(member.duration_s for member in members.values())])
        self._progresses_until = self._clock.now + max(part.progress_s for part in parts.values())
        if duration_s < math.inf:
            generation = self._generation
            # While a request waits for a hung step, the scheduler's timer keeps the run going.
            is_hung = duration_s > _HANG_S
            self._clock.after(duration_s, lambda: self._end(parts, members, generation), is_background=is_hung)

    def _end(self, parts: dict[int, Part], members: dict[tuple[int, int], MemberPart], generation: int) -> None:
        if generation != self._generation:
            return
        if self._held_until > self._clock.now:
            self._clock.at(self._held_until, lambda: self._end(parts, members, generation))
            return
        for part in parts.values():
            part.on_end()
        for (rank, _), member in members.items():
            output = parts[rank].output
            assert output is not None, "a leader runs a step as if it had no members"
            member.on_end(output)

    def _check_agreement(self, rank: int, part: Part) -> None:
        request = part.request
        carried = request.num_tokens_across_dp
        assert len(carried) == len(self._ranks), "the plan lacks the token counts of some ranks"
        assert carried[rank - self._ranks[0]] == part.num_tokens, (
            "the plan has a different number of tokens than the step"
        )
        for other, waiting in self._waiting.items():
            theirs = waiting.request
            assert (theirs.epoch, theirs.step_id) == (request.epoch, request.step_id), (
                f"deadlock: rank {rank} runs step {request.step_id}, rank {other} waits in step {theirs.step_id}"
            )
            assert list(theirs.num_tokens_across_dp) == list(carried), "ranks have different plans of one step"
            assert theirs.graph_batch_size == request.graph_batch_size, "some ranks run a graph, others do not"


def num_prompt_tokens_of(request: worker_pb2.StepRequest) -> int:
    """The number of prompt tokens that a step computes."""
    chunks = [*request.chunks, *(enter.chunk for enter in request.enters)]
    return sum(len(chunk.token_ids) for chunk in chunks) // TOKEN_DTYPE.itemsize
