"""Captures: computations made repeatable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shared.limits import GRAPH_BATCH_SIZES


class NotRepeatableError(Exception):
    """A computation does what a replay would leave out; the message says what."""


class Capture(Protocol):
    """Makes computations repeatable that read and write the same tensors each time."""

    batch_sizes: tuple[int, ...]
    """The sizes of decode steps that are captured unless the settings name others."""
    is_ahead: bool
    """Whether all sizes are captured before the first step, the largest first; else each with its first step."""
    is_recorded: bool
    """Whether a replay does not run Python: what was read from the host must then hold for every replay."""
    holds_collectives: bool
    """Whether a replay exchanges tensors with other ranks again."""

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture `compute`, whose result has a row for each of the batch.

        Returns:
            Its replay, whose result the next replay of any capture may overwrite.

        Raises:
            NotRepeatableError: it cannot be captured. So it is with every batch size, and on every rank.
        """


class CudaCapture:
    """CUDA and HIP graphs in one memory pool; see `Capture`. The smaller ones reuse the memory of the largest.

    The largest is captured first, so a size that is not smaller than the first begins other graphs, for which those
    before are gone, and their pool with them.
    """

    batch_sizes = GRAPH_BATCH_SIZES
    is_ahead = True
    is_recorded = True
    holds_collectives = True

    def __init__(self) -> None:
        self._shared: tuple[torch.cuda._POOL_HANDLE, Tensor] | None = None

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Capture`."""
        # Compiles kernels and fills the libraries' workspaces, neither of which may happen during a capture.
        result = compute()
        if self._shared is None or len(result) >= len(self._shared[1]):
            # One result for all sizes: each graph's own would stay allocated.
            self._shared = torch.cuda.graph_pool_handle(), torch.empty_like(result)
        pool, kept = self._shared[0], self._shared[1][: len(result)]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            kept.copy_(compute())

        def replay() -> Tensor:
            graph.replay()
            return kept

        return replay
