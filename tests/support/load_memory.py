"""Loads a model and says how much memory that took: `python -m tests.support.load_memory MODEL_DIR BACKEND`.

A process of its own, since memory that was freed before would hide what the loading takes. Pages of mapped files do
not count: the kernel takes them back whenever it needs them.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch

from services.worker.models.loader import load_model
from services.worker.ops import load_ops

_STATUS = Path("/proc/self/status")
_SAMPLE_S = 0.001


class PeakMemory:
    """Samples this process's anonymous memory until it is left."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.peak = max(self.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    """This process's resident memory without pages of files."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print as JSON what the loading took at most and what is left of it, in bytes."""
    torch.set_num_threads(1)
    ops = load_ops(sys.argv[2])
    # What libraries allocate at their first use is not the loading's.
    ops.prepare_linear(torch.ones(8, 8), None)(torch.ones(1, 8))
    before = anonymous_bytes()
    with PeakMemory() as memory:
        loaded = load_model(Path(sys.argv[1]), ops, torch.float32, lambda _: None)
        after = anonymous_bytes()
    assert loaded.model
    print(json.dumps({"peak": memory.peak - before, "kept": after - before}))  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
