"""What a worker has computed since its process started."""

from __future__ import annotations

from shared.histogram import Histogram
from shared.step.step import Step, StepKind

DUMMY = "dummy"

# A decode step of a small model on a GPU takes less than a millisecond, a long prefill on a CPU seconds.
_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class KindTotals:
    """The steps of one kind."""

    __slots__ = ("device_s", "num_tokens")

    def __init__(self) -> None:
        self.device_s = Histogram(_BOUNDS_S)
        self.num_tokens = 0


class StepTotals:
    """The steps by kind: as the scheduler names it, or a dummy. One thread adds; any may read."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Steps of all kinds."""
        self.by_kind = {name: KindTotals() for name in (*(kind.value for kind in StepKind), DUMMY)}
        # A step does not look its kind's name up.
        self._by_kind = {kind: self.by_kind[kind.value] for kind in StepKind}

    def add(self, step: Step, *, num_tokens: int, device_time_us: int) -> None:
        """Count a step that the device has computed."""
        self.num_steps += 1
        totals = self.by_kind[DUMMY] if step.is_dummy else self._by_kind[step.kind]
        totals.num_tokens += num_tokens
        totals.device_s.observe(1e-6 * device_time_us)
