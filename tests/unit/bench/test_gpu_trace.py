"""What a trace says of a step."""

from __future__ import annotations

import pytest

from tests.bench.gpu.trace import Run, busy_us, step_rows

RUNS = [Run("gemm", 0.0, 40.0), Run("norm", 50.0, 60.0), Run("gemm", 55.0, 90.0), Run("norm", 56.0, 58.0)]


def test_time_in_which_several_kernels_run_counts_once() -> None:
    assert busy_us(RUNS) == 40 + 40


def test_a_step_is_the_mean_of_those_recorded() -> None:
    rows = {row.metric: row.value for row in step_rows("step", RUNS, 2)}
    assert rows == {
        "step: kernels, copies and fills": 2,
        "step: time": 45,
        "step: time without a kernel": pytest.approx(100 * 10 / 90),
        "step: gemm": 37.5,
        "step: norm": 6,
    }


def test_a_trace_of_nothing_has_no_kernels() -> None:
    assert [row.value for row in step_rows("step", [], 2)] == [0]
