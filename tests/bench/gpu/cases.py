"""Cases of a benchmark that must end in time: none begins that the budget may not hold, and none ends the others."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from tests.bench.parts.report import Row, limit

# A case that took this many times as long as estimated would still end within the budget.
_SAFETY = 1.5


@dataclass(frozen=True, slots=True)
class Case:
    """Something to measure."""

    name: str
    seconds: float
    """An estimate for a GPU, kernels compiled."""
    rows: Callable[[], Iterable[Row]]


class Budget:
    """What is left of a time, and how far estimates have been from it."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ends_at = now() + seconds
        self._estimated_s = self._took_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the end; negative after it."""
        return self._ends_at - self._now()

    def holds(self, seconds: float) -> bool:
        """Whether a case with this estimate would end in time, if estimates are as wrong as they were so far."""
        slowdown = max(1.0, self._took_s / self._estimated_s) if self._estimated_s else 1.0
        return _SAFETY * slowdown * seconds < self.left_s

    def learn(self, estimated_s: float, took_s: float) -> None:
        """What a case took."""
        self._estimated_s += estimated_s
        self._took_s += took_s


class Clock:
    """Measures work on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], object]) -> float:
        """How long `work` takes until the device has done it."""
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def median_s(self, work: Callable[[], object], repeats: int) -> float:
        """The median of several times, after a warm-up."""
        work()
        return statistics.median(self.seconds(work) for _ in range(repeats))

    def mean_s(self, work: Callable[[], object], repeats: int) -> float:
        """The mean of works that are launched without waiting, after a warm-up."""

        def all_of_them() -> None:
            for _ in range(repeats):
                work()

        work()
        return self.seconds(all_of_them) / repeats

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def run_cases(cases: Iterable[Case], budget: Budget) -> Iterator[Row]:
    """Rows as they come. What fails, or what the budget may not hold, has a row that says so."""
    try:
        for case in cases:
            yield from _run_case(case, budget)
    except Exception as error:  # noqa: BLE001 - whatever it is, other stages have a machine only now
        yield _failed("making a case", error)


def _run_case(case: Case, budget: Budget) -> Iterator[Row]:
    if not budget.holds(case.seconds):
        yield Row(f"{case.name}: left out, as it may take", case.seconds, "s")
        return
    started = time.monotonic()
    try:
        yield from case.rows()
    except Exception as error:  # noqa: BLE001 - as above: the other cases
        yield _failed(case.name, error)
    budget.learn(case.seconds, time.monotonic() - started)


def _failed(name: str, error: Exception) -> Row:
    traceback.print_exception(error)
    return limit(f"{name}: {type(error).__name__}", 1, "failures", at_most=0)
