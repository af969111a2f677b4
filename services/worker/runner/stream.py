"""The order in which a device computes, and how the host learns that it has.

    host      launch 1   launch 2   wait for 1        launch 3
    device               ── 1 ───────────┤── 2 ──────────┤── 3 ──

On a GPU the host is ahead: what a launch reads on the host must stay as it is until the launch has computed. On a CPU
the host is the device, and a launch has computed when it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from services.worker.forward.staging import PinnedStaging, SharedStaging, Staging


class Launch(Protocol):
    """Work given to a stream."""

    def wait(self) -> int:
        """Return when the device has computed it: the time that took, in microseconds. From any thread; does not spin.

        Raises what the work raised, or RuntimeError if the device failed.
        """


class Stream(Protocol):
    """One device's work, in the order of its launches. One thread launches."""

    is_async: bool
    """Whether the host may be ahead of the device."""

    def launch(self, work: Callable[[], None]) -> Launch:
        """Give `work` to the device. It reads host memory that only staging may reuse, and waits for nothing."""

    def synchronize(self) -> None:
        """Return when the device has computed all launches."""

    def claim_staging(self) -> Staging:
        """Staging for the next launch."""

    def return_staging(self, staging: Staging) -> None:
        """Give back what a launch used that was waited for. From any thread."""


class HostStream:
    """The thread that launches computes. See `Stream`."""

    is_async = False

    def launch(self, work: Callable[[], None]) -> Launch:
        """See `Stream`; raises what the work raises."""
        started_ns = time.perf_counter_ns()
        work()
        return _Computed((time.perf_counter_ns() - started_ns) // 1000)

    def synchronize(self) -> None:
        """See `Stream`."""

    def claim_staging(self) -> Staging:
        """See `Stream`."""
        return SharedStaging()

    def return_staging(self, staging: Staging) -> None:
        """See `Stream`."""


class StagingPool:
    """As many as there are launches in flight: each is used again only after its launch has computed."""

    def __init__(self, device: torch.device, *, is_pinned: bool) -> None:
        """See `PinnedStaging`."""
        self._device = device
        self._is_pinned = is_pinned
        self._free: SimpleQueue[Staging] = SimpleQueue()

    def claim(self) -> Staging:
        """One that no launch uses."""
        try:
            return self._free.get_nowait()
        except Empty:
            return PinnedStaging(self._device, is_pinned=self._is_pinned)

    def put_back(self, staging: Staging) -> None:
        """From any thread."""
        self._free.put(staging)


class CudaStream:
    """A GPU's current stream, NVIDIA's or AMD's. See `Stream`."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = StagingPool(device, is_pinned=True)

    def launch(self, work: Callable[[], None]) -> Launch:
        """See `Stream`."""
        started, ended = _timed_event(), _timed_event()
        started.record()
        work()
        ended.record()
        return _CudaLaunch(started, ended)

    def synchronize(self) -> None:
        """See `Stream`."""
        torch.cuda.synchronize(self._device)

    def claim_staging(self) -> Staging:
        """See `Stream`."""
        return self._staging.claim()

    def return_staging(self, staging: Staging) -> None:
        """See `Stream`."""
        self._staging.put_back(staging)


class _Computed:
    def __init__(self, device_time_us: int) -> None:
        self._device_time_us = device_time_us

    def wait(self) -> int:
        return self._device_time_us


class _CudaLaunch:
    def __init__(self, started: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        self._started = started
        self._ended = ended

    def wait(self) -> int:
        self._ended.synchronize()
        elapsed_ms: float = self._started.elapsed_time(self._ended)
        return round(elapsed_ms * 1000)


def _timed_event() -> torch.cuda.Event:
    """An event whose waiters sleep."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


def make_stream(device: torch.device) -> Stream:
    """The stream of a device's launches."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
