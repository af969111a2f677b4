"""The step stream of one epoch between a scheduler and one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.ids import DpRank
from tests.simulation.network.network import Pipe


@dataclass(frozen=True, slots=True)
class Answer:
    """A step's result in transit."""

    rank: DpRank
    epoch: int
    step_id: int
    payload: bytes
    spoilers: list[int]
    """For each row that is not finite, the number of the sequence that spoilt it."""
    is_nonsense: bool


@dataclass(frozen=True, slots=True)
class Holder:
    """The scheduler that holds a group, and its epoch; the default means that none does."""

    epoch: int = 0
    instance_id: str = ""


NO_HOLDER = Holder()


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """The callbacks of the two ends. `on_broken` receives the holder of the group if the stream was refused for it."""

    on_beat: Callable[[int, bool], None]
    """Receives the worker's progress, and whether it is leaving."""
    on_broken: Callable[[Holder], None]
    on_closed: Callable[[bool], None]
    """Receives whether no scheduler needs the worker any more."""


class StepStream:
    """Carries steps to a rank, answers back, and heartbeats both ways. Closing either end notifies the other."""

    def __init__(
        self, number: int, claimed: Holder, ends: StreamEnds, *, steps: Pipe[bytes], answers: Pipe[Answer]
    ) -> None:
        """Open a stream; `claimed` is the epoch and instance id under which the scheduler claims the group."""
        self.number = number
        self.claimed = claimed
        self.steps = steps
        self.answers = answers
        self.is_broken = False
        self._ends = ends

    def beat(self, progress: int, *, is_leaving: bool) -> None:
        """Deliver the worker's heartbeat, unless the link is silent."""
        if not self.is_broken and not self.answers.is_held:
            self._ends.on_beat(progress, is_leaving)

    def break_(self, holder: Holder = NO_HOLDER) -> None:
        """End the stream from the worker's side, or break it; the scheduler is notified."""
        if not self.is_broken:
            self._cut()
            self._ends.on_broken(holder)

    def close(self, *, is_last: bool = False) -> None:
        """End the stream from the scheduler's side, perhaps with a last word; the worker is notified."""
        if not self.is_broken:
            self._cut()
            self._ends.on_closed(is_last)

    def _cut(self) -> None:
        self.is_broken = True
        self.steps.cut()
        self.answers.cut()
