"""sentence-transformers in its own environment, in a process that loads the model once.

It reads one request per line, `{"texts": [texts], "batch_size": n}`, and answers each with `{"seconds": s}`. It needs
only its environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.bench.peers.environments import SENTENCES
from tests.bench.peers.protocol import ROOT


class Sentences:
    """The running process; created by `start_sentences`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def encode_s(self, texts: Sequence[str], batch_size: int) -> float:
        """How long it takes to make the vectors of these texts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"texts": list(texts), "batch_size": batch_size}) + "\n")
        self._process.stdin.flush()
        seconds: float = json.loads(self._process.stdout.readline())["seconds"]
        return seconds


@contextmanager
def start_sentences(model_dir: Path, dtype: str) -> Iterator[Sentences]:
    """Start the process, which computes in torch's `dtype`, and wait until it has loaded the model; it ends with this.

    Raises:
        LeftOutError: its environment cannot be made.
    """
    command = [SENTENCES.python(), str(Path(__file__)), str(model_dir), dtype]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            sentences = Sentences(process)
            sentences.encode_s(["a first text"], 1)
            yield sentences
        finally:
            process.kill()


def _serve(model_dir: str, dtype: str) -> None:
    # Only that environment has them.
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = SentenceTransformer(model_dir, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        model.encode(request["texts"], batch_size=request["batch_size"], show_progress_bar=False)
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
