"""Cases of a benchmark that must end in time: none begins that the budget may not hold, and none ends the others.

One that hangs, as a service may that never answers, is ended after a few times its estimate.
"""

from __future__ import annotations

import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from tests.bench.report import Row, limit

# A case that took this many times as long as estimated would still end within the budget.
_SAFETY = 1.5
# A case is ended after this many times its estimate, and at least so many seconds.
_MOST_ESTIMATES, _LEAST_LIMIT_S = 4.0, 60.0

# Limits the seconds of its body.
Limit = Callable[[float], AbstractContextManager[None]]


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


@contextmanager
def ending_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body once it has taken so long, and a call into a library has returned.

    Only in the main thread of a process that has no other use for SIGALRM.
    """

    def end(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s more")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def run_cases(cases: Iterable[Case], budget: Budget, limited: Limit = lambda _: nullcontext()) -> Iterator[Row]:
    """Rows as they come. What fails, or what the budget may not hold, has a row that says so.

    Args:
        limited: Ends cases that hang; by default nothing does.
    """
    try:
        for case in cases:
            yield from _run_case(case, budget, limited)
    except Exception as error:  # noqa: BLE001 - whatever it is, other stages have a machine only now
        yield _failed("making a case", error)


def _run_case(case: Case, budget: Budget, limited: Limit) -> Iterator[Row]:
    if not budget.holds(case.seconds):
        yield Row(f"{case.name}: left out, as it may take", case.seconds, "s")
        return
    started = time.monotonic()
    ends_at = started + min(max(_MOST_ESTIMATES * case.seconds, _LEAST_LIMIT_S), budget.left_s)
    try:
        rows = iter(case.rows())
        while True:
            # Not around the `yield`: whoever gets the row must not be interrupted.
            with limited(max(ends_at - time.monotonic(), 1.0)):
                row = next(rows, None)
            if row is None:
                break
            yield row
    except Exception as error:  # noqa: BLE001 - as above: the other cases
        yield _failed(case.name, error)
    budget.learn(case.seconds, time.monotonic() - started)


def _failed(name: str, error: Exception) -> Row:
    traceback.print_exception(error)
    return limit(f"{name}: {type(error).__name__}", 1, "failures", at_most=0)
