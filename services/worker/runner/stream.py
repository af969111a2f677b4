"""The order in which a device computes, and how the host learns that it has.

    host      enqueue 1  enqueue 2  wait for 1        enqueue 3
    device               ── 1 ───────────┤── 2 ──────────┤── 3 ──

On a GPU the host is ahead: what work reads on the host must stay as it is until the device has computed it. On a CPU
the host is the device, and work is computed when `enqueue` returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import torch
from typing_extensions import override

from services.worker.forward.staging import HostArrays, PinnedStaging, SharedStaging, Staging


class EnqueuedWork(Protocol):
    """Work given to a stream."""

    def wait(self) -> int:
        """Return when the device has computed it: the time that took, in microseconds. From any thread; does not spin.

        Raises what the work raised, or RuntimeError if the device failed.
        """


class Stream(Protocol):
    """One device's work, in the order in which one thread enqueues it."""

    is_async: bool
    """Whether the host may be ahead of the device."""

    def enqueue(self, work: Callable[[], None]) -> EnqueuedWork:
        """Give `work` to the device. It reads host memory that only staging may reuse, and waits for nothing."""

    def synchronize(self) -> None:
        """Return when the device has computed all that was enqueued."""

    def stage(self, arrays: HostArrays) -> Staging:
        """Staging for the work that is enqueued next, with what it uploads: arrays of int32, int64 or float32.

        It is read, from any thread, once that work was waited for.
        """


class HostStream(Stream):
    """The stream of a CPU: the thread that enqueues computes."""

    is_async = False

    def enqueue(self, work: Callable[[], None]) -> EnqueuedWork:
        """See `Stream`; raises what the work raises."""
        started_ns = time.perf_counter_ns()
        work()
        return _HostWork(device_time_us=(time.perf_counter_ns() - started_ns) // 1000)

    @override
    def synchronize(self) -> None:
        pass

    @override
    def stage(self, arrays: HostArrays) -> Staging:
        return SharedStaging(arrays)


class StagingPool:
    """Staging for all work in flight: each is used again only after its work was computed."""

    def __init__(self, device: torch.device, *, is_pinned: bool) -> None:
        """`is_pinned` makes copies to a GPU asynchronous."""
        self._device = device
        self._is_pinned = is_pinned
        self._free: SimpleQueue[PinnedStaging] = SimpleQueue()

    def claim(self) -> PinnedStaging:
        """Staging that no work uses, until it is read."""
        try:
            return self._free.get_nowait()
        except Empty:
            staging = PinnedStaging(self._device, is_pinned=self._is_pinned)
            staging.give_back = self._free.put
            return staging


class CudaStream(Stream):
    """A GPU's current stream, NVIDIA's or AMD's. See `Stream`."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = StagingPool(device, is_pinned=True)

    @override
    def enqueue(self, work: Callable[[], None]) -> EnqueuedWork:
        started, ended = _timed_event(), _timed_event()
        started.record()
        work()
        ended.record()
        return _CudaWork(started, ended)

    @override
    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    @override
    def stage(self, arrays: HostArrays) -> Staging:
        staging = self._staging.claim()
        staging.pack(arrays)
        return staging


class _HostWork(NamedTuple):
    device_time_us: int

    def wait(self) -> int:
        return self.device_time_us


class _CudaWork:
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
    """The stream of a device's work."""
    return CudaStream(device) if device.type == "cuda" else HostStream()
