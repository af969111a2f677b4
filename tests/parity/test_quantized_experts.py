"""Mixtures of experts in published quantisation formats, against plain checkpoints with the same values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.worker.ops import BACKEND_NAMES
from shared.model_files.model_dir import CONFIG
from tests.support.models.parity import SmallModels, load_paged, make_prompts
from tests.support.models.quantized_checkpoints import (
    SCHEMES,
    WEIGHTS,
    Scheme,
    mxfp4_stack,
    write_checkpoint,
    write_quantized,
)
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model

_INT4 = SCHEMES["compressed int4, groups"]
# llm-compressor excludes routers like this.
INT4 = replace(_INT4, config={**_INT4.config, "ignore": ["lm_head", "re:.*mlp.gate$"]})
# As gpt-oss is published.
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


MOST_ROUNDING = 0.03


def logits_of(directory: Path, backend: str) -> Tensor:
    """The logits of every token of one prompt; a short one in Triton's interpreter."""
    paged = load_paged(directory, backend)
    return paged.prefill_all(paged.add(make_prompts((6 if backend == "triton" else 40,))[0]))


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [
        ("Qwen3MoeForCausalLM", SCHEMES["fp8, blocks"]),
        ("Qwen3MoeForCausalLM", INT4),
        ("Glm4MoeForCausalLM", INT4),
        ("DeepseekV3ForCausalLM", SCHEMES["fp8, blocks"]),
        ("Glm4MoeLiteForCausalLM", INT4),
        ("GlmMoeDsaForCausalLM", SCHEMES["fp8, blocks"]),
    ],
    ids=["qwen3-moe fp8", "qwen3-moe int4", "glm4-moe int4", "deepseek-v3 fp8", "glm-4.7-flash int4", "glm-5 fp8"],
)
def test_quantized_experts_compute_what_their_values_do(
    small_models: SmallModels, tmp_path: Path, backend: str, architecture: str, scheme: Scheme
) -> None:
    plain = small_models.get(architecture, "plain").directory
    quantized, values = write_quantized(plain, tmp_path, scheme)
    expected = logits_of(values, backend)
    torch.testing.assert_close(logits_of(quantized, backend), expected, rtol=1e-5, atol=1e-5)
    assert (logits_of(plain, backend) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("backend", [*BACKEND_NAMES, pytest.param("triton", marks=pytest.mark.slow)])
def test_gpt_oss_computes_the_same_from_mxfp4_as_from_its_values(tmp_path: Path, backend: str) -> None:
    # The format has groups of 32.
    values = {**SMALL_CONFIGS["GptOssForCausalLM"]["plain"], "intermediate_size": 64}
    plain = write_small_model(build_model("GptOssForCausalLM", values), tmp_path / "plain")
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / WEIGHTS).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = meant[name] = tensor
            continue
        stack = mxfp4_stack(tensor)
        stored.update({name + suffix: part for suffix, part in stack.tensors.items()})
        meant[name] = stack.values
    config = json.loads((plain / CONFIG).read_text())
    write_checkpoint(plain, tmp_path / "stored", {**config, "quantization_config": MXFP4}, stored)
    write_checkpoint(plain, tmp_path / "values", config, meant)
    expected, actual = (logits_of(tmp_path / name, backend) for name in ("values", "stored"))
    if backend == "native":
        # Its kernels quantise activations to 8 bits, whose rounding is about a hundredth of a typical value.
        assert (actual - expected).std() < MOST_ROUNDING * expected.std()
    else:
        assert torch.equal(actual, expected)
    assert (logits_of(plain, backend) - expected).abs().max() > 1e-2
