"""Contestants that take turns: repeats alternate between them, and only one computes at a time."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.bench.peers.environments import VLLM, XGRAMMAR
from tests.bench.peers.protocol import Process, start_process


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one repeat, and the calibration time during it."""

    figures: Mapping[str, float]
    calibration_us: float


class Turns:
    """Measures scenarios in the contestants' processes.

    Figures are medians over the repeats; after `least_`, the least of them. Those in µs are scaled by the calibration
    time just before and after, relative to its fastest run, which gives the time on an otherwise idle machine.
    """

    def __init__(self, modules: Mapping[str, str], num_repeats: int) -> None:
        """Prepare; `modules` maps each contestant to its module under `tests.bench.peers`."""
        self._modules = modules
        self._num_repeats = num_repeats
        self._best_calibration_us = float("inf")

    @contextlib.contextmanager
    def start(self, *contestants: str) -> Iterator[list[Process]]:
        """Start a fresh process for each; vLLM's and xgrammar's run in separate environments."""
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(self._start_one(name)) for name in contestants]

    def measure(self, *processes: Process) -> list[dict[str, float]]:
        """Measure the scenario of each process, which must be built; returns the medians."""
        samples: list[list[Sample]] = [[] for _ in processes]
        for _ in range(self._num_repeats):
            for process, its_samples in zip(processes, samples, strict=True):
                its_samples.append(Sample(*process.run()))
        measured = [sample.calibration_us for its_samples in samples for sample in its_samples]
        self._best_calibration_us = min(self._best_calibration_us, *measured)
        return [self._medians(its_samples) for its_samples in samples]

    def measure_one(self, process: Process, scenario: str, **arguments: object) -> dict[str, float]:
        """Build and measure a scenario in one process; returns the medians."""
        process.start(scenario, **arguments)
        return self.measure(process)[0]

    def _start_one(self, name: str) -> contextlib.AbstractContextManager[Process]:
        python = sys.executable
        if name.startswith("vllm"):
            python = VLLM.python()
        elif name.startswith("xgrammar"):
            python = XGRAMMAR.python()
        return start_process(name, python, f"tests.bench.peers.{self._modules[name]}")

    def _medians(self, samples: Sequence[Sample]) -> dict[str, float]:
        figures: dict[str, float] = {}
        for name in samples[0].figures:
            values = [self._scaled(sample, name) for sample in samples]
            figures |= {name: statistics.median(values), f"least_{name}": min(values)}
        return figures

    def _scaled(self, sample: Sample, name: str) -> float:
        is_time = name.endswith("_us")
        return sample.figures[name] * (self._best_calibration_us / sample.calibration_us if is_time else 1.0)
