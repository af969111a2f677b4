"""Prompt log-probabilities against transformers in float32."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from services.worker.models.loader import load_model
from services.worker.ops import load_ops
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.model_runner import ModelRunner
from shared.request.sampling_params import SamplingOptions
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.worker.worker_driver import Request, WorkerDriver

NUM_TOP = 5


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("max_chunk", [7, 64, 1000])
def test_prompt_logprobs_are_those_of_transformers(tmp_path: Path, backend: str, max_chunk: int) -> None:
    model_dir = write_tiny_llama(tmp_path)
    ops = load_ops(backend)
    runner = ModelRunner(load_model(model_dir, ops, torch.float32, lambda _: None), ops, KvCacheSize(2**26))
    draw = random.Random(4)
    prompts = [[draw.randrange(512) for _ in range(length)] for length in (200, 17, 2)]
    options = SamplingOptions(num_prompt_logprobs=NUM_TOP)
    driver = WorkerDriver(runner, block_size=16, max_chunk=max_chunk)
    answers = driver.generate([Request(prompt, 2, options=options) for prompt in prompts])
    theirs = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert sorted(answer.prompt_logprobs) == list(range(1, len(prompt)))
        for position, (_, token_ids, values) in answer.prompt_logprobs.items():
            row = expected[position - 1]
            assert token_ids[0] == prompt[position]
            np.testing.assert_allclose(values, row[token_ids], atol=1e-4)
            np.testing.assert_allclose(values[1:], row.topk(NUM_TOP).values, atol=1e-4)
