"""How idle a cell's device is between steps, from a trace that its worker writes of some of them.

The time that a worker reports of its steps would not do: a step's time begins when the device has reached the step, not
when the host has launched the first kernel.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from tests.bench.gpu.trace import Run
from tests.support.system.scraping import scrape

# Kernels of a graph follow each other sooner; the host needs longer to launch a step.
LEAST_GAP_US = 10.0
_NUM_STEPS = "lockstep_step_device_time_seconds_count"
_GPU_KINDS, _CPU_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}, {"cpu_op"}
_POLL_S, _TIMEOUT_S = 0.05, 60.0


def record(
    send: Callable[[], object], *, worker_address: str, manage_address: str, traces: Path, num_steps: int, is_gpu: bool
) -> list[Run]:
    """What the device ran in `num_steps` steps under a load, after as many of its steps had ended.

    Args:
        send: Sends a load, and returns when it was answered; called until the steps are traced.
        worker_address: The worker's RPCs.
        manage_address: Its metrics.
        traces: Its `--profile-dir`.
        is_gpu: On a CPU, whatever torch calls stands for kernels.

    Raises:
        grpc.RpcError: the worker writes no traces, or has not had so many steps in a minute.
    """

    def trace() -> Path:
        last = read_metric(manage_address, _NUM_STEPS) + num_steps
        ends_at = time.monotonic() + _TIMEOUT_S
        while read_metric(manage_address, _NUM_STEPS) < last and time.monotonic() < ends_at:
            time.sleep(_POLL_S)
        with grpc.insecure_channel(worker_address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            response = stub.Profile(worker_pb2.ProfileRequest(num_steps=num_steps), timeout=_TIMEOUT_S)
        name: str = response.file_name
        return traces / name

    with ThreadPoolExecutor(1) as pool:
        traced = pool.submit(trace)
        while not traced.done():
            send()
        return read_runs(traced.result(), is_gpu=is_gpu)


def read_metric(manage_address: str, name: str) -> float:
    """The sum of a worker's samples of this name."""
    families = asyncio.run(scrape(manage_address))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def read_runs(trace: Path, *, is_gpu: bool) -> list[Run]:
    """What a trace in Chrome's format says that the device ran."""
    kinds = _GPU_KINDS if is_gpu else _CPU_KINDS
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Run(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in kinds
    ]


def idle_between_steps(runs: Sequence[Run]) -> float:
    """The part of the time from the first run to the end of the last in gaps that no graph leaves between its kernels.

    Args:
        runs: At least one.
    """
    ordered = sorted(runs, key=lambda run: run.started_us)
    idle_us, until = 0.0, ordered[0].started_us
    for run in ordered:
        gap_us = run.started_us - until
        idle_us += gap_us if gap_us >= LEAST_GAP_US else 0.0
        until = max(until, run.ended_us)
    return idle_us / (until - ordered[0].started_us)
