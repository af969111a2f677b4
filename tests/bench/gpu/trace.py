"""What the device does during decode steps, kernel by kernel, from torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from tests.bench.gpu.cases import Case
from tests.bench.gpu.decode import dense_limits, load_rows
from tests.bench.gpu.runners import GREEDY, Bench, Held, decode_ahead
from tests.bench.parts.report import Row

SHAPES, TINY_SHAPES = ("qwen3-8b", "qwen3-0.6b"), ("tiny",)
NUM_KERNELS = 8
"""Those that take the most time have a row."""
_LOAD_S, _CASE_S = 60.0, 15.0
_WARM_UP_STEPS = 4
_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class Run:
    """A kernel, copy or fill that the device ran; times are in microseconds."""

    name: str
    started_us: float
    ended_us: float


def cases(bench: Bench) -> Iterator[Case]:
    """The smallest batch and the largest of each shape."""
    for shape in bench.options.selected(SHAPES, TINY_SHAPES):
        sizes = bench.options.effort.batch_sizes
        held = Held(f"{shape}, traced", dense_limits(bench))
        yield Case(f"{shape}, traced: load", _LOAD_S, partial(load_rows, bench, held, shape))
        if held.runner is None:
            continue
        for batch_size in (min(sizes), max(sizes)):
            measure = partial(_trace_rows, bench, held, shape, batch_size)
            yield Case(f"{shape}: trace of {batch_size}", _CASE_S, measure)
        held.free()


def _trace_rows(bench: Bench, held: Held, shape: str, num_seqs: int) -> Iterator[Row]:
    effort = bench.options.effort
    held.fill(num_seqs, effort.context, num_later=effort.num_steps + _WARM_UP_STEPS + 1, sampling=GREEDY)
    decode_ahead(held.loaded, _WARM_UP_STEPS)
    runs = _record(bench, held, effort.num_steps)
    yield from step_rows(f"{shape}, decode step of {num_seqs}", runs, effort.num_steps)


def _record(bench: Bench, held: Held, num_steps: int) -> list[Run]:
    """On a CPU, whatever torch calls stands for kernels."""
    is_gpu = bench.device.type == "cuda"
    activities = [ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        decode_ahead(held.loaded, num_steps)
        if is_gpu:
            torch.cuda.synchronize()
    wanted = "CUDA" if is_gpu else "CPU"
    return [
        Run(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events() or ()
        if event.device_type.name == wanted
    ]


def step_rows(name: str, runs: Sequence[Run], num_steps: int) -> Iterator[Row]:
    """The mean step: how many kernels it has, how long the device runs none, and what takes the most time."""
    if not runs:
        yield Row(f"{name}: kernels", 0, "kernels")
        return
    span_us = max(run.ended_us for run in runs) - min(run.started_us for run in runs)
    yield Row(f"{name}: kernels, copies and fills", len(runs) / num_steps, "nodes")
    yield Row(f"{name}: time", span_us / num_steps, "us")
    yield Row(f"{name}: time without a kernel", 100 * (1 - busy_us(runs) / span_us), "%")
    name_to_us: dict[str, float] = defaultdict(float)
    for run in runs:
        name_to_us[run.name[:_LONGEST_NAME]] += run.ended_us - run.started_us
    for kernel in sorted(name_to_us, key=name_to_us.__getitem__, reverse=True)[:NUM_KERNELS]:
        yield Row(f"{name}: {kernel}", name_to_us[kernel] / num_steps, "us")


def busy_us(runs: Sequence[Run]) -> float:
    """The time in which at least one of them ran."""
    busy, until = 0.0, float("-inf")
    for run in sorted(runs, key=lambda run: run.started_us):
        busy += max(0.0, run.ended_us - max(run.started_us, until))
        until = max(until, run.ended_us)
    return busy
