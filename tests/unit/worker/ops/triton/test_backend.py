"""Models on the `triton` backend generate what they generate on the reference backend."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.config import WorkerSettings
from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.triton.backend import TritonOps
from services.worker.runner.cache_memory import KvCacheSize
from services.worker.runner.model_runner import ModelRunner
from services.worker.runner.start.build import build_model_runner
from shared.request.sampling_params import SamplingOptions
from shared.step.step import Step
from tests.support.kernels.attention_batches import random
from tests.support.kernels.sampling import AlternatingMatcher, Recipe, make_rows, sample_with
from tests.support.models.paged_model import PagedModel
from tests.support.models.quantized_checkpoints import SCHEMES, write_quantized
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.tiny_llama import TINY_CONFIG, write_tiny_llama
from tests.support.worker.worker_steps import decode_step, make_chunk, make_enter, mixed_step, prefill_step

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 1}
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], **SMALL_CONFIGS["Qwen3MoeForCausalLM"]["plain"]}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], **SMALL_CONFIGS["GptOssForCausalLM"]["plain"]}
DEEPSEEK_V32 = {"architectures": ["DeepseekV32ForCausalLM"], **SMALL_CONFIGS["DeepseekV32ForCausalLM"]["plain"]}
GLM_5 = {"architectures": ["GlmMoeDsaForCausalLM"], **SMALL_CONFIGS["GlmMoeDsaForCausalLM"]["types"]}
# Changes of the configuration, and what matrices are quantised to.
MODELS: dict[str, tuple[dict[str, Any], MatrixFormat | None]] = {
    "llama": ({}, None),
    # One layer: llama shows that layers have caches of their own.
    "qwen3": ({**QWEN3, "num_hidden_layers": 1}, None),
    "qwen3, int8": ({**QWEN3, "num_hidden_layers": 1}, MatrixFormat.INT8),
    "qwen3-moe": (QWEN3_MOE, None),
    "qwen3-moe, int4": (QWEN3_MOE, MatrixFormat.INT4),
    "gpt-oss": (GPT_OSS, None),
    # Most tokens of the longer prompts see more than 12.
    "deepseek-v3.2": ({**DEEPSEEK_V32, "index_topk": 12}, None),
    # One layer selects for both.
    "glm-5": ({**GLM_5, "num_hidden_layers": 2, "indexer_types": ["full", "shared"], "index_topk": 12}, None),
}
# In the interpreter, a product takes milliseconds for every tile, and experts have many.
SLOW, PROOFS = ("qwen3, int8", "deepseek-v3.2", "glm-5"), ("qwen3-moe", "qwen3-moe, int4", "gpt-oss")
BLOCK_SIZE = 3
SHORT, LONG = [5, 9, 2, 44, 17], [8, 1, 60, 33, 21, 4, 4, 90, 12, 7, 300, 2, 61, 5, 5, 88, 140, 3, 71, 10]


def make_runner(model_dir: Path, backend: str, quantization: MatrixFormat | None) -> ModelRunner:
    ops = load_ops(backend)
    options = LoadOptions(dummy_seed=1, quantization=quantization)
    loaded = load_model(model_dir, ops, torch.float32, lambda _: None, options=options)
    runner = ModelRunner(loaded, ops, KvCacheSize(0, num_blocks=64))
    runner.attach(block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=256)
    return runner


def tokens_of(runner: ModelRunner, step: Step) -> list[int]:
    tokens: list[int] = runner.run_step(step).token_ids.tolist()
    return tokens


def blocks(first: int, num_tokens: int) -> range:
    return range(first, first - -num_tokens // BLOCK_SIZE)


def generate(runner: ModelRunner) -> list[list[int]]:
    """The tokens of each step of a short life: prefill, decode, chunks, a cached prefix, preemption and resumption."""
    first = make_enter(0, SHORT, range(5))
    second = make_enter(1, LONG, range(5, 14))
    chunked = make_enter(2, LONG[:13], range(20, 30), num_later_tokens=9)
    tokens = [
        tokens_of(runner, prefill_step(first, second)),
        tokens_of(runner, decode_step()),
        tokens_of(runner, mixed_step(chunked)),
        tokens_of(runner, mixed_step(chunks=[make_chunk(2, [*LONG[13:], 6, 7])])),
        tokens_of(runner, decode_step()),
    ]
    # Six blocks of the second sequence hold the first 18 tokens of this one.
    cached = make_enter(3, [*LONG[18:], 9], [*range(5, 11), 40, 41], num_cached_tokens=18)
    tokens.append(tokens_of(runner, prefill_step(cached, leave=[0])))
    resumed = make_enter(4, [*SHORT, *(step[0] for step in tokens[:5])], range(50, 55))
    tokens.append(tokens_of(runner, mixed_step(resumed, rows=[1, 2, 3])))
    return [*tokens, tokens_of(runner, decode_step(rows=[4, 3, 2, 1]))]


def models() -> list[Any]:
    marks = {**dict.fromkeys(SLOW, pytest.mark.slow), **dict.fromkeys(PROOFS, pytest.mark.proof)}
    return [pytest.param(model, marks=marks.get(model, ())) for model in MODELS]


@pytest.mark.parametrize("model", models())
def test_a_model_generates_what_it_generates_on_the_reference_backend(tmp_path: Path, model: str) -> None:
    changes, quantization = MODELS[model]
    config = {**TINY_CONFIG, "num_hidden_layers": 2, "tie_word_embeddings": False, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    triton, reference = (generate(make_runner(tmp_path, backend, quantization)) for backend in ("triton", "reference"))
    assert triton == reference
    assert len({token for step in triton for token in step}) > 4


def write_qwen3_with_scales(model_dir: Path) -> Path:
    """A model of one layer, with scales of its keys and values."""
    write_tiny_llama(model_dir, changes={**QWEN3, "num_key_value_heads": 2, "num_hidden_layers": 1})
    tensors, layer = load_file(model_dir / "model.safetensors"), "model.layers.0.self_attn"
    norms = {f"{layer}.{name}.weight": 1 + 0.3 * random(16) for name in ("q_norm", "k_norm")}
    scales = {f"{layer}.k_scale": torch.tensor(0.01), f"{layer}.v_scale": torch.tensor(0.3)}
    save_file({**tensors, **norms, **scales}, model_dir / "model.safetensors")
    return model_dir


def test_so_it_does_over_a_cache_in_fp8_with_the_checkpoints_scales(tmp_path: Path) -> None:
    model_dir, generated = write_qwen3_with_scales(tmp_path), []
    for backend in ("triton", "reference"):
        values = {"ops_backend": backend, "dtype": "float32", "kv_cache_dtype": "fp8", "kv_cache_num_blocks": 64}
        settings = WorkerSettings.model_validate({"model_dir": model_dir, "device": "cpu", **values})
        runner = build_model_runner(settings, lambda _: None)
        runner.attach(block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=256)
        generated.append(generate(runner))
    assert generated[0] == generated[1]
    assert len({token for step in generated[0] for token in step}) > 4


@pytest.mark.usefixtures("float8")
def test_with_activations_in_fp8_a_models_logits_are_near_those_of_the_reference_backend(tmp_path: Path) -> None:
    plain = write_tiny_llama(tmp_path / "plain", changes={"num_hidden_layers": 2})
    model_dir, _ = write_quantized(plain, tmp_path / "fp8", SCHEMES["fp8, channels"])
    quantizing = TritonOps()
    quantizing.quantize_activations()
    logits = []
    for ops in (load_ops("reference"), quantizing):
        paged = PagedModel(load_model(model_dir, ops, torch.float32, lambda _: None).model, ops, num_blocks=8)
        logits.append(paged.prefill_all(paged.add(LONG)))
    error = float((logits[1] - logits[0]).norm() / logits[0].norm())
    # Each product is off by 3 % or so.
    assert 0.005 < error < 0.15


def test_linear_adds_the_bias() -> None:
    x, weight, bias = random(2, 24), random(40, 24, seed=1), random(40, seed=2)
    torch.testing.assert_close(TritonOps().prepare_linear(weight, bias, torch.float32)(x), x @ weight.T + bias)


def test_greedy_takes_the_lowest_of_equal_columns_and_nan_before_all() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0], [math.nan, 9.0, math.nan, 0.0]])
    token_ids, largest = TritonOps().greedy_sample(logits)
    assert token_ids.tolist() == [1, 0]
    assert largest.isnan().tolist() == [False, True]


def test_its_numbers_depend_on_torch_triton_and_the_device() -> None:
    assert TritonOps().numerics().startswith(f"triton torch-{torch.__version__} triton-")


def test_the_sampler_draws_the_same_tokens_with_every_option() -> None:
    width, prompt = 333, (3, 5, 8)
    everything = SamplingOptions(
        min_p=0.125, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((7, 4.0),)
    )
    recipes = [
        Recipe(temperature=0.0),
        Recipe(),
        Recipe(temperature=0.75, top_k=20, top_p=0.75, seed=2**64 - 1),
        Recipe(options=SamplingOptions(min_p=0.25, num_logprobs=3, logprob_token_ids=(5, 300))),
        Recipe(options=everything, temperature=1.5),
        Recipe(options=SamplingOptions(), make_matcher=lambda: AlternatingMatcher(width)),
        Recipe(options=SamplingOptions(min_tokens=2, num_logprobs=0), temperature=0.0, stop_token_ids=(1, 2, 9)),
    ]
    generator = torch.Generator().manual_seed(7)
    backends = load_ops("reference"), TritonOps()
    states = [
        {row: state for row, recipe in enumerate(recipes) if (state := recipe.make_state(prompt, width)) is not None}
        for _ in backends
    ]
    for step in range(3):
        logits = torch.randn(len(recipes), width, generator=generator) * 3
        rows = [make_rows(recipes, [len(prompt) + step] * len(recipes), states=each) for each in states]
        expected, sampled = (sample_with(ops, logits, own) for ops, own in zip(backends, rows, strict=True))
        assert sampled.token_ids.tolist() == expected.token_ids.tolist()
        assert sampled.failed_grammar_rows.tolist() == expected.failed_grammar_rows.tolist() == []
        assert sampled.logprobs is not None
        assert expected.logprobs is not None
        assert sampled.logprobs.token_ids.tolist() == expected.logprobs.token_ids.tolist()
        np.testing.assert_allclose(sampled.logprobs.values, expected.logprobs.values, rtol=2e-6, atol=1e-6)
