"""A worker that captures the decode steps of `reference` in Python.

`python -m tests.support.cells.capturing_worker FLAGS`. It tells of each forward pass that it replays by a line on
stderr. A draw is no such pass: a rank that is idle in a step has nothing to draw.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from services.worker.__main__ import main
from services.worker.ops.reference.backend import ReferenceOps
from tests.support.worker.graphs import CountingCapture

REPLAYED = "a graph was replayed"


class _ToldCapture(CountingCapture):
    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        num_passes = len(self.replays)
        replay = super().__call__(compute)
        if len(self.replays) == num_passes:
            return replay

        def told() -> Tensor:
            print(REPLAYED, file=sys.stderr, flush=True)  # noqa: T201
            return replay()

        return told


def _make_capture(*_: Any) -> CountingCapture:
    return _ToldCapture()


if __name__ == "__main__":
    ReferenceOps.make_capture = _make_capture  # type: ignore[assignment]
    sys.exit(main())
