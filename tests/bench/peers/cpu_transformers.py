"""transformers' `generate` in float32 as a contestant on CPUs; runs in our own environment."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.bench.peers.cpu_generation import Engine, Loads, generate_with
from tests.bench.peers.protocol import serve


class TransformersEngine:
    """One static batch per load, on all cores."""

    def __init__(self, model_dir: str) -> None:
        logging.disable_progress_bar()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)

    def generate(self, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> float:
        """See `Engine`."""
        batch = torch.tensor(prompts)
        start = time.perf_counter()
        output = self._model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=False,
            min_new_tokens=num_output_tokens,
            max_new_tokens=num_output_tokens,
        )
        seconds = time.perf_counter() - start
        assert output.shape[1] == batch.shape[1] + num_output_tokens
        return seconds


def _make_engines(_: Loads, *, model_dir: str) -> list[Engine]:
    return [TransformersEngine(model_dir)]


if __name__ == "__main__":
    serve({"generate": generate_with(_make_engines)})
