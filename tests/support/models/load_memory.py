"""Loads a model and reports the memory it took.

`python -m tests.support.models.load_memory [--dtype DTYPE] MODEL_DIR BACKEND [QUANTIZATION]`. The backend `packing`
keeps weights packed and has no kernels for them.

It runs as a separate process, since memory freed earlier would hide what loading takes. Pages of mapped files are not
counted: the kernel can reclaim them at any time.
"""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path

import torch

from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from tests.support.models.packing_ops import PackingOps

_STATUS = Path("/proc/self/status")
_SAMPLE_S = 0.001


class PeakMemory:
    """Records the peak of this process's anonymous memory while the context is active."""

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
    """This process's resident memory in bytes, without file pages."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print as JSON the peak and the remaining memory of loading, in bytes."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("backend")
    parser.add_argument("quantization", type=MatrixFormat, nargs="?")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    ops = PackingOps() if arguments.backend == "packing" else load_ops(arguments.backend)
    options, dtype = LoadOptions(quantization=arguments.quantization), getattr(torch, arguments.dtype)
    # Warm up, so that what libraries allocate at first use is not counted.
    ops.prepare_linear(torch.ones(8, 8), None, torch.float32)(torch.ones(1, 8))
    before = anonymous_bytes()
    with PeakMemory() as memory:
        loaded = load_model(arguments.model_dir, ops, dtype, lambda _: None, options=options)
        after = anonymous_bytes()
    assert loaded.model
    print(json.dumps({"peak": memory.peak - before, "kept": after - before}))  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
