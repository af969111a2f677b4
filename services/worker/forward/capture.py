"""Captures: computations made repeatable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from shared.request.limits import GRAPH_BATCH_SIZES


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
    has_device: bool
    """Whether replays run on a device of its own, where each launch costs the host time and padding costs little."""
    holds_collectives: bool
    """Whether a replay exchanges tensors with other ranks again."""

    def begin(self) -> None:
        """What was captured before is gone, and with it the memory that it shared."""

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture `compute`, whose result has a row for each of the batch.

        Returns:
            Its replay, whose result the next replay of any capture with such rows may overwrite.

        Raises:
            NotRepeatableError: it cannot be captured. So it is with every batch size, and on every rank.
        """


class CudaCapture(Capture):
    """CUDA and HIP graphs in one memory pool; see `Capture`. The smaller ones reuse the memory of the largest."""

    batch_sizes = GRAPH_BATCH_SIZES
    is_ahead = True
    is_recorded = True
    has_device = True
    holds_collectives = True

    def __init__(self) -> None:
        self._pool: torch.cuda._POOL_HANDLE | None = None
        # The shape of a row and its dtype, to the result of all sizes: each graph's own would stay allocated.
        self._results: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def begin(self) -> None:
        """See `Capture`. A pool goes with the last of its graphs."""
        self._pool = None
        self._results.clear()

    @override
    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # Compiles kernels and fills the libraries' workspaces, neither of which may happen during a capture.
        result = compute()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        kept = self._result_like(result)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            kept.copy_(compute())

        def replay() -> Tensor:
            graph.replay()
            return kept

        return replay

    def _result_like(self, result: Tensor) -> Tensor:
        kind = result.shape[1:], result.dtype
        kept = self._results.get(kind)
        if kept is None or len(kept) < len(result):
            self._results[kind] = kept = torch.empty_like(result)
        return kept[: len(result)]
