"""What the processes of one TP group may run, and when their leader may speak for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from services.worker.process.exits import ExitCode
from tests.simulation.clock import Clock

# Silence is noticed at the fifth sign of one's own after it began, and these are 0.75 s apart: within 4 s. It begins
# when what a link has held back for 2 s has come.
MAX_UNNOTICED_S = 7.0

StepKey = tuple[int, int]
"""An epoch and the number of one of its steps."""


@dataclass(slots=True)
class _Rank:
    """What one process of the group has done since it began."""

    fence: int = 0
    """The epoch that it was told last."""
    attached: int = 0
    """The epoch whose empty batch its device holds."""
    num_received: int = 0
    num_begun: int = 0
    num_ended: int = 0


@dataclass(slots=True)
class GroupWatch:
    """Follows one start of a group's processes, by TP rank.

    What it finds wrong ends the simulation from the clock: an error that is raised among the group's tasks would pass
    for one of a link.
    """

    clock: Clock
    tp_size: int
    _ranks: list[_Rank] = field(init=False)
    _steps: list[StepKey] = field(default_factory=list)
    """That a device of the group has begun, in order."""
    _step_to_number: dict[StepKey, int] = field(default_factory=dict)
    _payloads: list[bytes] = field(default_factory=list)
    """Of the steps that the leader has launched, in order."""

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in range(self.tp_size)]

    def fence(self, tp_rank: int, epoch: int) -> None:
        """A process is told an epoch."""
        rank = self._ranks[tp_rank]
        self._check(epoch > rank.fence, "an epoch is told twice, or after a later one")
        self._check(epoch <= self._ranks[0].fence or not tp_rank, "a member is ahead of its leader")
        rank.fence = epoch

    def attach(self, tp_rank: int, epoch: int) -> None:
        """A process's device holds an empty batch."""
        rank = self._ranks[tp_rank]
        self._check(rank.num_begun == rank.num_ended, "a device begins an epoch inside a step")
        rank.attached = epoch

    def send(self, payload: bytes) -> None:
        """The leader relays a step."""
        self._payloads.append(payload)

    def receive(self, tp_rank: int, payload: bytes) -> None:
        """A member gets a step."""
        rank = self._ranks[tp_rank]
        self._check(payload == self._payloads[rank.num_received], "a member gets another step than its leader")
        rank.num_received += 1

    def launch(self, tp_rank: int, step: StepKey) -> None:
        """A process gives its device a step."""
        self._check(step[0] >= self._ranks[tp_rank].fence, "a process launches a step that is older than its fence")

    def begin(self, tp_rank: int, step: StepKey) -> None:
        """A process's device begins a step."""
        rank = self._ranks[tp_rank]
        if rank.num_begun == len(self._steps):
            self._step_to_number[step] = len(self._steps)
            self._steps.append(step)
        expected = self._steps[rank.num_begun]
        self._check(step == expected, f"rank {tp_rank} of a group runs step {step}, another one runs {expected}")
        rank.num_begun += 1

    def end(self, tp_rank: int) -> None:
        """A process's device has run the step that it began last."""
        self._ranks[tp_rank].num_ended += 1

    def accept(self, epoch: int) -> None:
        """The leader says that the group holds an epoch and an empty batch."""
        for tp_rank, rank in enumerate(self._ranks):
            is_held = (rank.fence, rank.attached) == (epoch, epoch) or (not tp_rank and rank.fence == epoch)
            self._check(is_held, f"a group accepts an epoch that its rank {tp_rank} does not hold")
            self._check(rank.num_begun == rank.num_ended, f"a group accepts an epoch while its rank {tp_rank} runs")

    def answer(self, step: StepKey) -> None:
        """The leader sends a step's result."""
        number = self._step_to_number[step]
        for tp_rank, rank in enumerate(self._ranks):
            self._check(rank.num_ended > number, f"an answer to a step that rank {tp_rank} has not run")

    def leave(self, code: ExitCode, reason: str) -> None:
        """A process ends by itself: all that can happen to it here is that it loses a partner."""
        self._check(code is ExitCode.LINK_LOST, f"a process of a group ends: {reason}")

    def _check(self, condition: bool, message: str) -> None:
        if not condition:
            self.clock.after(0.0, partial(_fail, message))


def _fail(message: str) -> None:
    raise AssertionError(message)
