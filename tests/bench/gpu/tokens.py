"""The real model's greedy tokens on the device, each beside what the CPU would have chosen after the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from services.worker.config import WorkerSettings
from services.worker.runner.start.build import build_model_runner
from tests.bench.gpu.cases import Case
from tests.bench.gpu.runners import Bench
from tests.bench.parts.report import Row, limit
from tests.bench.rocm_smoke import BATCH_SIZES, NUM_BLOCKS, count_wrong, generate, make_prompts

_CASE_S = 60.0


def cases(bench: Bench) -> Iterator[Case]:
    """With each backend for the device, eagerly and from graphs; nothing without a model."""
    model_dir = bench.options.model_dir
    if model_dir is None:
        yield Case("the real model", 1.0, lambda: [Row("the real model: left out, as none was given", 0, "tokens")])
        return
    kinds = [("triton", True), ("triton", False), ("triton-exact", False)]
    for backend, is_eager in kinds if bench.device.type == "cuda" else [("auto", False)]:
        name = f"{model_dir.name}, {backend}, {'eagerly' if is_eager else 'from graphs'}"
        yield Case(name, _CASE_S, partial(_token_rows, bench, model_dir, backend, is_eager=is_eager))


def _token_rows(bench: Bench, model_dir: Path, backend: str, *, is_eager: bool) -> Iterator[Row]:
    """A token is right if its logit on the CPU is the largest, or almost."""
    # A CPU's fast kernels would compute with rounded activations.
    formats = {} if bench.device.type == "cuda" else {"dtype": "float32", "quantization": "none"}
    settings = WorkerSettings.model_validate(
        {
            **formats,
            "model_dir": model_dir,
            "device": bench.options.device,
            "ops_backend": backend,
            "enforce_eager": is_eager,
            "graph_batch_sizes": BATCH_SIZES,
            "kv_cache_num_blocks": NUM_BLOCKS,
        }
    )
    prompts = make_prompts(model_dir)
    completions = generate(build_model_runner(settings, lambda _: None), prompts)
    kind = f"{model_dir.name}, {backend}, {'eagerly' if is_eager else 'from graphs'}"
    yield Row(f"{kind}: tokens compared", sum(map(len, completions)), "tokens")
    wrong = count_wrong(model_dir, prompts, completions)
    yield limit(f"{kind}: tokens that the CPU would not have chosen", wrong, "tokens", at_most=0)
