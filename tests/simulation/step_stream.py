"""The step stream of one epoch between a scheduler and one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.network import Pipe


@dataclass(frozen=True, slots=True)
class Answer:
    """A step's result on its way: the message, and by whom each row that is not finite was spoilt."""

    rank: int
    epoch: int
    step_id: int
    payload: bytes
    spoilers: list[int]
    is_nonsense: bool


@dataclass(frozen=True, slots=True)
class Holder:
    """Which scheduler holds a group, and under which epoch; nobody at first."""

    epoch: int = 0
    instance_id: str = ""


NOBODY = Holder()


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """Who is at the two ends: what each is handed. `on_broken` learns who holds the group, where that is why."""

    on_progress: Callable[[int], None]
    on_broken: Callable[[Holder], None]
    on_closed: Callable[[], None]


class StepStream:
    """Steps go there, answers come back, and signs of life both ways. Either end may end it; the other is told."""

    def __init__(
        self, number: int, claimed: Holder, ends: StreamEnds, *, steps: Pipe[bytes], answers: Pipe[Answer]
    ) -> None:
        """Begin; `claimed` is what the scheduler says that it holds."""
        self.number = number
        self.claimed = claimed
        self.steps = steps
        self.answers = answers
        self.is_broken = False
        self._ends = ends

    def beat(self, progress: int) -> None:
        """The worker's sign of life, unless the link lets nothing through."""
        if not self.is_broken and not self.answers.is_held:
            self._ends.on_progress(progress)

    def break_(self, holder: Holder = NOBODY) -> None:
        """The worker ends it, or it breaks: the scheduler is told."""
        if not self.is_broken:
            self._cut()
            self._ends.on_broken(holder)

    def close(self) -> None:
        """The scheduler ends it: the worker is told."""
        if not self.is_broken:
            self._cut()
            self._ends.on_closed()

    def _cut(self) -> None:
        self.is_broken = True
        self.steps.cut()
        self.answers.cut()
