"""Captures of graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from shared.limits import GRAPH_BATCH_SIZES


class CountingCapture:
    """Computes again at each replay; counts what is captured and how often each is replayed. See `Capture`."""

    batch_sizes = GRAPH_BATCH_SIZES
    is_ahead = True
    is_recorded = False
    holds_collectives = True

    def __init__(self) -> None:
        self.replays: list[int] = []

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        number = len(self.replays)
        self.replays.append(0)
        # A capture computes once, as it does on a GPU.
        compute()

        def replay() -> Tensor:
            self.replays[number] += 1
            return compute()

        return replay
