"""How a launch is timed, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.bench.gpu.cases import Clock
from tests.bench.gpu.floors import Rates
from tests.bench.gpu.kernels.ops import launch_s
from tests.bench.gpu.runners import Bench, Options


class Device:
    """What torch is asked to do with a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sync_mode = "default"
        self.num_launched = self.num_captures = 0
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self._set_sync_mode)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self._capturing)

    def launch(self) -> None:
        """Does not wait."""
        self.num_launched += 1

    def launch_and_wait(self) -> None:
        """Waits, which raises where that is asked for."""
        if self.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    def replay(self) -> None:
        """See `torch.cuda.CUDAGraph`."""

    def _set_sync_mode(self, mode: str) -> None:
        self.sync_mode = mode

    @contextmanager
    def _capturing(self, _: Device) -> Iterator[None]:
        self.num_captures += 1
        yield


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.fixture
def bench() -> Bench:
    gpu = torch.device("cuda")
    return Bench(Options(shapes=("tiny",)), Path(), gpu, Clock(gpu), Rates(1.0, 1.0))


def test_a_launch_is_timed_from_a_graph_of_many(bench: Bench, device: Device) -> None:
    launch_s(bench, device.launch)
    assert (device.num_captures, device.num_launched) == (1, 2 + bench.options.effort.num_repeats)


def test_a_launch_that_waits_fails_before_it_is_captured(bench: Bench, device: Device) -> None:
    with pytest.raises(RuntimeError, match="synchronizing"):
        launch_s(bench, device.launch_and_wait)
    assert (device.num_captures, device.sync_mode) == (0, "default")
