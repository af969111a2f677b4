"""The memory that a GPU has left for the KV cache."""

from __future__ import annotations

import pytest
import torch

from services.worker.runner.cache_memory import GpuMemory

GIB = 1024**3


class PlayedGpu:
    """Plays `torch.cuda` on a GPU of 80 GiB with 16 GiB of weights, beside another process."""

    def __init__(self, patch: pytest.MonkeyPatch, *, used_by_others: int) -> None:
        self.allocated = self.peak = 16 * GIB
        self._used_by_others = used_by_others
        for name in ("empty_cache", "synchronize"):
            patch.setattr(torch.cuda, name, lambda: None)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)
        patch.setattr(torch.cuda, "memory_allocated", lambda: self.allocated)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        patch.setattr(torch.cuda, "mem_get_info", self._info)

    def run_prefill(self) -> None:
        """Needs 3 GiB for a while."""
        self.peak = max(self.peak, self.allocated + 3 * GIB)

    def _reset(self) -> None:
        self.peak = self.allocated

    def _info(self) -> tuple[int, int]:
        return 80 * GIB - self.allocated - self._used_by_others, 80 * GIB


@pytest.mark.parametrize(("used_by_others", "expected"), [(0, 53), (5, 48), (60, 0)])
def test_the_cache_gets_what_weights_prefills_and_others_leave(
    monkeypatch: pytest.MonkeyPatch, used_by_others: int, expected: int
) -> None:
    gpu = PlayedGpu(monkeypatch, used_by_others=used_by_others * GIB)
    assert GpuMemory(0.9)(gpu.run_prefill) == expected * GIB
