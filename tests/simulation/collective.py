"""The device time of a failure domain: its ranks' steps run together, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.internal.v1 import worker_pb2
from shared.limits import TOKEN_DTYPE
from tests.simulation.clock import Clock

_HANG_S = 100.0


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a step that its device has begun; it takes `duration_s` by itself.

    For `progress_s` its process tells of progress, and with it those of all ranks: they meet in every layer.
    """

    request: worker_pb2.StepRequest
    num_tokens: int
    duration_s: float
    progress_s: float
    on_end: Callable[[], None]


class Collective:
    """Lets the parts of one step end together, once every rank of the domain has begun its own.

    A rank that begins while another one waits in a different step is a deadlock: neither would ever end. So are parts
    that do not agree on what their collectives carry.
    """

    def __init__(self, clock: Clock, ranks: range) -> None:
        self._clock = clock
        self._ranks = ranks
        self._waiting: dict[int, Part] = {}
        self._held_until = 0.0
        self._progresses_until = 0.0
        # Of the processes: what began in earlier ones never ends.
        self._generation = 0

    def begin(self, rank: int, part: Part) -> None:
        """A rank's device begins a step; it begins no other before this one has ended."""
        assert rank not in self._waiting, "a device begins a step beside another"
        self._waiting[rank] = part
        if len(self._ranks) > 1:
            self._check_agreement(rank, part)
        if len(self._waiting) == len(self._ranks):
            parts, self._waiting = self._waiting, {}
            duration_s = max(part.duration_s for part in parts.values())
            self._progresses_until = self._clock.now + max(part.progress_s for part in parts.values())
            if duration_s < math.inf:
                generation = self._generation
                # While anybody waits for one that hangs, the scheduler's timer goes.
                is_hung = duration_s > _HANG_S
                self._clock.after(duration_s, lambda: self._end(parts, generation), is_background=is_hung)

    @property
    def gets_on(self) -> bool:
        """Whether ranks tell of progress in a step that takes long."""
        return self._clock.now < self._progresses_until

    def hold(self, until: float) -> None:
        """A rank's process does nothing until then: no step ends on any rank."""
        self._held_until = max(self._held_until, until)

    def reset(self) -> None:
        """The domain's processes are gone."""
        self._waiting.clear()
        self._held_until = self._progresses_until = 0.0
        self._generation += 1

    def _end(self, parts: dict[int, Part], generation: int) -> None:
        if generation != self._generation:
            return
        if self._held_until > self._clock.now:
            self._clock.at(self._held_until, lambda: self._end(parts, generation))
            return
        for part in parts.values():
            part.on_end()

    def _check_agreement(self, rank: int, part: Part) -> None:
        request = part.request
        carried = request.num_tokens_across_dp
        assert len(carried) == len(self._ranks), "the plan does not have the tokens of every rank"
        assert carried[rank - self._ranks.start] == part.num_tokens, "the plan has other tokens than the step"
        for other, waiting in self._waiting.items():
            theirs = waiting.request
            assert (theirs.epoch, theirs.step_id) == (request.epoch, request.step_id), (
                f"deadlock: rank {rank} runs step {request.step_id}, rank {other} waits in step {theirs.step_id}"
            )
            assert list(theirs.num_tokens_across_dp) == list(carried), "ranks have other plans of one step"
            assert theirs.graph_batch_size == request.graph_batch_size, "some ranks run a graph, others do not"


def num_prompt_tokens_of(request: worker_pb2.StepRequest) -> int:
    """Tokens of prompts that a step computes."""
    chunks = [*request.chunks, *(enter.chunk for enter in request.enters)]
    return sum(len(chunk.token_ids) for chunk in chunks) // TOKEN_DTYPE.itemsize
