"""The private memory of a worker that serves: its weights, its KV cache and little else."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.ops.native.isa import available_isas
from tests.bench.parts.cpu_formats import FORMATS, ModelSize
from tests.bench.parts.tokens import PromptSource
from tests.bench.parts.worker_memory import importing_bytes, private_bytes
from tests.bench.peers.cpu_cell import start_cell_engine

# Small, so that the requests below use all of it.
KV_CACHE_GIB = 0.125
MARGIN_BYTES = 200 << 20
# Requests at a time, and the tokens of their prompts and answers. The logits of many take most memory.
LOADS = ((32, 64, 16), (128, 16, 8), (1, 1500, 8))


@pytest.mark.proof
@pytest.mark.skipif(not available_isas(), reason="weights are kept in 8 and 4 bits by the native backend alone")
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_serving_worker_has_little_memory_besides_weights_and_kv_cache(float32_model: Path, name: str) -> None:
    form = FORMATS[name]
    flags = (*form.flags, "--worker.ops-backend=native", f"--worker.kv-cache-memory-gib={KV_CACHE_GIB}")
    bound = importing_bytes() + ModelSize.of(float32_model).weight_bytes(form) + KV_CACHE_GIB * 2**30 + MARGIN_BYTES
    with start_cell_engine(float32_model, *flags) as engine:
        pid = engine.cell.role_to_process["worker"].pid
        for num_requests, num_prompt_tokens, num_output_tokens in LOADS:
            engine.generate(PromptSource(num_prompt_tokens, seed=num_requests).take(num_requests), num_output_tokens)
            assert private_bytes(pid) <= bound, f"after {num_requests} requests of {num_prompt_tokens} tokens"
