"""Captures of graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable


class CountingCapture:
    """Computes again at each replay; counts what is captured and how often each is replayed. See `Capture`."""

    is_recorded = False

    def __init__(self) -> None:
        self.replays: list[int] = []

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        number = len(self.replays)
        self.replays.append(0)
        # A capture computes once, as it does on a GPU.
        compute()

        def replay() -> None:
            self.replays[number] += 1
            compute()

        return replay
