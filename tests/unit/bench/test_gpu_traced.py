"""How idle a device is between traced steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.gpu.serving.traced import LEAST_GAP_US, idle_between_steps, read_runs
from tests.bench.gpu.trace import Run


def test_only_gaps_that_no_graph_leaves_are_idle() -> None:
    within = LEAST_GAP_US - 1
    runs = [Run("a", 0.0, 50.0), Run("b", 50.0 + within, 80.0), Run("long", 10.0, 100.0), Run("c", 130.0, 150.0)]
    assert idle_between_steps(runs) == pytest.approx(30 / 150)
    assert idle_between_steps(runs[:2]) == 0


def test_a_trace_is_read_without_what_the_host_did(tmp_path: Path) -> None:
    def event(kind: str, **more: object) -> dict[str, object]:
        return {"ph": "X", "cat": kind, "name": kind, "ts": 5.0, "dur": 2.0, **more}

    events = [
        *(event(kind) for kind in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "cuda_runtime")),
        {"ph": "M", "name": "process_name"},
        event("kernel", ph="i"),
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    assert [run.name for run in read_runs(trace, is_gpu=True)] == ["kernel", "gpu_memcpy", "gpu_memset"]
    assert read_runs(trace, is_gpu=False) == [Run("cpu_op", 5.0, 7.0)]
