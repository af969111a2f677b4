"""How much memory the KV cache may take, and what a GPU's memory is in use for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MeasureMemory = Callable[[Callable[[], None]], int]
"""Maps a function that runs the largest prefill to the bytes that are left for the cache."""


@dataclass(frozen=True, slots=True)
class KvCacheSize:
    """Limits of the KV cache."""

    memory_bytes: int
    num_blocks: int | None = None
    """None means as many as the memory holds."""
    measure: MeasureMemory | None = None
    """Measures the memory when the batch's limits are known, instead of `memory_bytes`."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Measures what the current GPU has left; see `MeasureMemory`.

    The device's memory times `utilization`, less all that is in use (by other processes too) and the peak of the
    largest prefill. The rest of the device is for captured graphs and for libraries. Source: vLLM,
    `Worker.determine_available_memory` (v1/worker/gpu_worker.py).
    """

    utilization: float
    """More than 0, at most 1."""

    def __call__(self, run_largest_prefill: Callable[[], None]) -> int:
        """See `MeasureMemory`; possibly 0."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        run_largest_prefill()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - allocated
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return max(int(total * self.utilization) - (total - free) - peak, 0)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What this process has of a GPU's memory."""

    allocated_bytes: int
    """Bytes in tensors."""
    reserved_bytes: int
    """Held for tensors, in use or not."""


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Read torch's own books, so that no call to the driver disturbs a capture; None unless `device` is a GPU."""
    if device.type != "cuda":
        return None
    return DeviceMemory(torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))
