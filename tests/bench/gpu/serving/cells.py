"""A cell with random weights, all services as processes, and what its worker says of itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.bench.gpu.runners import Bench
from tests.bench.gpu.serving.client import Clients, Served
from tests.bench.gpu.serving.requests import Request
from tests.bench.gpu.serving.traced import read_metric, record
from tests.bench.gpu.trace import Run
from tests.support.cells.cell import Cell, start_cell
from tests.support.models.tiny_tokenizer import write_tiny_tokenizer
from tests.support.system.ports import free_port

_DEVICE_TIME = "lockstep_step_device_time_seconds_sum"
# Below the benchmark's own folder.
_TRACES = "traces"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that a cell served."""

    served: Served
    outside_steps: float
    """The part of the time that the worker does not count as its steps'."""
    num_compiled: int
    """Kernels that were compiled meanwhile."""


@dataclass(frozen=True, slots=True)
class DummyCell:
    """A running cell; created by `start_dummy_cell`."""

    cell: Cell
    manage_address: str
    kernels: Path
    """Where its worker's Triton keeps what it compiles."""
    traces: Path
    """Where its worker writes traces."""

    def load(self, clients: Clients, requests: list[Request]) -> Loaded:
        """Have clients send requests, and watch the worker meanwhile."""
        device_s, num_kernels = self._device_s(), self._num_kernels()
        served = clients.send(self.cell.address, requests)
        outside_steps = 1 - (self._device_s() - device_s) / served.seconds
        return Loaded(served, outside_steps, self._num_kernels() - num_kernels)

    def trace(self, clients: Clients, requests: list[Request], *, num_steps: int, is_gpu: bool) -> list[Run]:
        """Have clients send requests, again if they are few, and trace steps amid them; see `record`."""
        return record(
            lambda: clients.send(self.cell.address, requests),
            worker_address=self.cell.name_to_address["worker"],
            manage_address=self.manage_address,
            traces=self.traces,
            num_steps=num_steps,
            is_gpu=is_gpu,
        )

    def _device_s(self) -> float:
        return read_metric(self.manage_address, _DEVICE_TIME)

    def _num_kernels(self) -> int:
        return sum(1 for _ in self.kernels.glob("*")) if self.kernels.exists() else 0


@contextmanager
def start_dummy_cell(bench: Bench, shape: str, kernels: Path, *flags: str) -> Iterator[DummyCell]:
    """Start a cell, wait until it serves, and stop it at the end.

    Args:
        kernels: The worker's Triton keeps there what it compiles.
        flags: More of `lockstep serve`'s.
    """
    model_dir = bench.model_dir(shape)
    write_tiny_tokenizer(model_dir)
    address = f"127.0.0.1:{free_port()}"
    options = bench.options
    traces = bench.folder / _TRACES
    worker_flags = [f"--manage-listen={address}", f"--device={options.device}", "--load-format=dummy"]
    worker_flags.append(f"--profile-dir={traces}")
    if options.enforce_eager:
        worker_flags.append("--enforce-eager")
    if options.kv_cache_gib is not None:
        worker_flags.append(f"--kv-cache-memory-gib={options.kv_cache_gib}")
    all_flags = [flag.replace("--", "--worker.", 1) for flag in (*worker_flags, "--quantization=none")]
    with (
        mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": str(kernels)}),
        start_cell(model_dir, "--log-level=warning", *all_flags, *flags) as cell,
    ):
        yield DummyCell(cell, address, kernels, traces)
