"""Captures of graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shared.request.limits import GRAPH_BATCH_SIZES


class CountingCapture:
    """Computes again at each replay; counts what is captured and how often each is replayed. See `Capture`."""

    batch_sizes = GRAPH_BATCH_SIZES
    is_ahead = True
    is_recorded = False
    has_device = True
    holds_collectives = True

    def __init__(self) -> None:
        self.replays: list[int] = []
        """Of forward passes."""
        self.drawings: list[int] = []
        """Of draws, whose results are integers."""

    def begin(self) -> None:
        """See `Capture`."""

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        # A capture computes once, as it does on a GPU.
        counts = self.replays if compute().is_floating_point() else self.drawings
        number = len(counts)
        counts.append(0)

        def replay() -> Tensor:
            counts[number] += 1
            return compute()

        return replay
