"""Waits until a GPU's memory is free of what an earlier process had there.

A driver frees the memory of a process some time after the process has ended. A worker that is restarted meanwhile would
load beside it, and fail, or measure too little memory for its KV cache and keep that cache for life.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch
from typing_extensions import override

logger = logging.getLogger(__name__)

# Memory in use that no longer falls belongs to a process that lives: the worker shares the GPU, and must not wait
# longer at every start. Drivers free memory in few large steps, so this has to be longer than the pause between two.
_SETTLE_S = 10.0
# A process that does not end (its teardown hangs in the driver) needs an operator, who finds the warning in the log.
_LONGEST_S = 60.0
_POLL_S = 0.25
# What a process is taken to have before its first tensor: its context, and the code of libraries.
_CONTEXT_BYTES = 1 << 30


class MemoryGauge(Protocol):
    """A GPU's memory, and the clock to wait for it by."""

    def measure(self) -> tuple[int, int]:
        """Bytes that no other process uses, and bytes in all."""

    def now(self) -> float:
        """Seconds, monotonic."""

    def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""


class CurrentGpu(MemoryGauge):
    """The current GPU. See `MemoryGauge`."""

    @override
    def measure(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved(), total

    @override
    def now(self) -> float:
        return time.monotonic()

    @override
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def wait_for_memory(utilization: float, on_poll: Callable[[], None], gauge: MemoryGauge) -> None:
    """Return when the part `utilization` of the GPU's memory is free, or else when nothing more becomes free.

    The latter with a warning. It takes no time if the memory is free, `_SETTLE_S` if others keep some of it, and never
    much more than `_LONGEST_S`.

    Args:
        utilization: More than 0, at most 1; see `GpuMemory`.
        on_poll: Called several times a second; raising in it ends the waiting.
    """
    free, total = gauge.measure()
    wanted = min(int(total * utilization), total - _CONTEXT_BYTES)
    if free >= wanted:
        return
    started_at = grown_at = gauge.now()
    most_free = free
    while free < wanted and gauge.now() - grown_at < _SETTLE_S and gauge.now() - started_at < _LONGEST_S:
        on_poll()
        gauge.sleep(_POLL_S)
        free, _ = gauge.measure()
        if free > most_free:
            most_free, grown_at = free, gauge.now()
    fields = {
        "in_use_bytes": total - free,
        "total_bytes": total,
        "waited_s": round(gauge.now() - started_at, 1),
    }
    if free < wanted:
        logger.warning("other processes use GPU memory that this worker may take", extra=fields)
    else:
        logger.info("the GPU's memory has become free", extra=fields)
