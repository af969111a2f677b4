"""transformers' `generate` at batch 1, in a separate process that loads the model once.

It reads one request per line, `{"prompt": [ids], "num_output_tokens": n}`, and answers each with `{"seconds": s}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.system.processes import ROOT, module_command


class Reference:
    """The running process; created by `start_reference`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> float:
        """Generate for each prompt, one after the other; returns output tokens per second, including prefill."""
        seconds = sum(self._generate(prompt, num_output_tokens) for prompt in prompts)
        return len(prompts) * num_output_tokens / seconds

    def _generate(self, prompt: Sequence[int], num_output_tokens: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "num_output_tokens": num_output_tokens}) + "\n")
        self._process.stdin.flush()
        seconds: float = json.loads(self._process.stdout.readline())["seconds"]
        return seconds


@contextlib.contextmanager
def start_reference(model_dir: Path) -> Iterator[Reference]:
    """Start the process; it loads the model before its first answer, and uses no CPU while waiting."""
    command = module_command("tests.bench.parts.reference", str(model_dir))
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Reference(process)
        finally:
            process.kill()


def _serve(model_dir: str) -> None:
    # Only the reference process needs them.
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        prompt = torch.tensor([request["prompt"]])
        count = request["num_output_tokens"]
        start = time.perf_counter()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
        )
        seconds = time.perf_counter() - start
        assert output.shape[1] == prompt.shape[1] + count
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
