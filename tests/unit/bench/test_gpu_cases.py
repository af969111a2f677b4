"""Cases: none begins that may not end in time, and one that fails does not end the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.bench.gpu.cases import Budget, Case, ending_after, run_cases
from tests.bench.report import Row


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_holds_what_ends_in_time_with_a_margin() -> None:
    time = Time()
    budget = Budget(30.0, time)
    assert budget.holds(19.0)
    assert not budget.holds(20.0)
    time.now += 15.0
    assert not budget.holds(10.0)
    assert budget.left_s == 15.0


def test_estimates_that_were_too_low_count_for_later_ones() -> None:
    budget = Budget(90.0, Time())
    budget.learn(10.0, 5.0)
    assert budget.holds(59.0)
    # 40 s in all instead of 20: 90 s hold 30 s, with the margin.
    budget.learn(10.0, 35.0)
    assert not budget.holds(30.0)
    assert budget.holds(29.0)


def test_a_short_case_that_took_long_does_not_stop_long_ones() -> None:
    budget = Budget(300.0, Time())
    budget.learn(60.0, 60.0)
    budget.learn(1.0, 10.0)
    assert budget.holds(100.0)


def case(name: str, seconds: float = 1.0, *, fails: bool = False) -> Case:
    """A case with one row, which it may fail after."""

    def rows() -> Iterator[Row]:
        yield Row(name, 2.0, "ms")
        if fails:
            raise RuntimeError("no memory")

    return Case(name, seconds, rows)


def test_what_is_left_out_and_what_fails_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [case("a", fails=True), case("b", seconds=1000.0), case("c")]
    rows = list(run_cases(cases, Budget(100.0, Time())))
    assert [(row.metric, row.value, row.met) for row in rows] == [
        ("a", 2.0, None),
        ("a: RuntimeError", 1, False),
        ("b: left out, as it may take", 1000.0, None),
        ("c", 2.0, None),
    ]
    assert "no memory" in capsys.readouterr().err


def test_a_case_is_made_after_the_one_before_has_run() -> None:
    loaded: list[str] = []

    def load() -> list[Row]:
        loaded.append("model")
        return []

    def cases() -> Iterator[Case]:
        yield Case("load", 1.0, load)
        if loaded:
            yield case("measure")

    assert [row.metric for row in run_cases(cases(), Budget(100.0, Time()))] == ["measure"]


def test_a_case_that_cannot_be_made_ends_its_stage_with_a_row() -> None:
    def cases() -> Iterator[Case]:
        yield case("a")
        raise MemoryError

    rows = list(run_cases(cases(), Budget(100.0, Time())))
    assert [(row.metric, row.met) for row in rows] == [("a", None), ("making a case: MemoryError", False)]


def test_a_case_that_hangs_is_ended_after_a_few_times_its_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    limits = []

    @contextmanager
    def limited(seconds: float) -> Iterator[None]:
        limits.append(round(seconds))
        with ending_after(0.01):
            yield

    def rows() -> Iterator[Row]:
        yield Row("hangs", 1.0, "ms")
        time.sleep(60)

    hanging = Case("hangs", 20.0, rows)
    found = list(run_cases([hanging, case("b")], Budget(100.0, Time()), limited))
    assert [row.metric for row in found] == ["hangs", "hangs: TimeoutError", "b"]
    assert limits == [80, 80, 60, 60]
    assert "not done" in capsys.readouterr().err
