"""What the processes of one TP group may run, and when their leader may answer for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from services.worker.process.exits import ExitCode
from tests.simulation.network.clock import Clock

# Silence is noticed at a process's fifth own heartbeat after it began. These are 0.75 s apart, so within 4 s. It may
# begin only once a message that the link has held back for 2 s has arrived.
MAX_UNNOTICED_S = 7.0

StepKey = tuple[int, int]
"""(epoch, step id)"""


@dataclass(slots=True)
class _Rank:
    """What one process of the group has done since its start."""

    fence: int = 0
    """The last epoch relayed to it."""
    attached: int = 0
    """The epoch whose empty batch its device holds."""
    num_received: int = 0
    num_begun: int = 0
    num_ended: int = 0


@dataclass(slots=True)
class GroupWatch:
    """Follows one start of a group's processes, by TP rank.

    Violations are raised from the clock: an error raised inside the group's tasks would be taken for a link error.
    """

    clock: Clock
    tp_size: int
    _ranks: list[_Rank] = field(init=False)
    _steps: list[StepKey] = field(default_factory=list)
    """The steps that a device of the group has begun, in order."""
    _step_to_number: dict[StepKey, int] = field(default_factory=dict)
    _payloads: list[bytes] = field(default_factory=list)
    """The serialized steps that the leader has launched, in order."""

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in range(self.tp_size)]

    def fence(self, tp_rank: int, epoch: int) -> None:
        """Record that an epoch reaches a process."""
        rank = self._ranks[tp_rank]
        self._check(epoch > rank.fence, "an epoch is relayed twice, or after a later one")
        self._check(epoch <= self._ranks[0].fence or not tp_rank, "a member is ahead of its leader")
        rank.fence = epoch

    def attach(self, tp_rank: int, epoch: int) -> None:
        """Record that a process's device has attached an epoch, with an empty batch."""
        rank = self._ranks[tp_rank]
        self._check(rank.num_begun == rank.num_ended, "a device attaches an epoch during a step")
        rank.attached = epoch

    def send(self, payload: bytes) -> None:
        """Record that the leader relays a step."""
        self._payloads.append(payload)

    def receive(self, tp_rank: int, payload: bytes) -> None:
        """Record that a member receives a step."""
        rank = self._ranks[tp_rank]
        self._check(payload == self._payloads[rank.num_received], "a member gets a different step than its leader")
        rank.num_received += 1

    def submit(self, tp_rank: int, step: StepKey) -> None:
        """Record that a process submits a step to its device."""
        self._check(step[0] >= self._ranks[tp_rank].fence, "a process submits a step older than its fence")

    def begin(self, tp_rank: int, step: StepKey) -> None:
        """Record that a process's device begins a step."""
        rank = self._ranks[tp_rank]
        if rank.num_begun == len(self._steps):
            self._step_to_number[step] = len(self._steps)
            self._steps.append(step)
        expected = self._steps[rank.num_begun]
        self._check(step == expected, f"rank {tp_rank} of a group runs step {step}, another rank runs {expected}")
        rank.num_begun += 1

    def end(self, tp_rank: int) -> None:
        """Record that a process's device has finished the step it began last."""
        self._ranks[tp_rank].num_ended += 1

    def accept(self, epoch: int) -> None:
        """Check that the leader may report that the group holds an epoch with an empty batch."""
        for tp_rank, rank in enumerate(self._ranks):
            is_held = (rank.fence, rank.attached) == (epoch, epoch) or (not tp_rank and rank.fence == epoch)
            self._check(is_held, f"a group accepts an epoch that its rank {tp_rank} does not hold")
            self._check(rank.num_begun == rank.num_ended, f"a group accepts an epoch while its rank {tp_rank} runs")

    def answer(self, step: StepKey) -> None:
        """Check that the leader may send a step's result."""
        number = self._step_to_number[step]
        for tp_rank, rank in enumerate(self._ranks):
            self._check(rank.num_ended > number, f"an answer to a step that rank {tp_rank} has not run")

    def leave(self, code: ExitCode, reason: str) -> None:
        """Check that a process ends itself only because it has lost a peer."""
        self._check(code is ExitCode.LINK_LOST, f"a process of a group ends: {reason}")

    def _check(self, condition: bool, message: str) -> None:
        if not condition:
            self.clock.after(0.0, partial(_fail, message))


def _fail(message: str) -> None:
    raise AssertionError(message)
