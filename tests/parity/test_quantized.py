"""Quantised checkpoints of families with experts: our output against transformers' on the dequantised values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.worker.models.loader import load_model
from services.worker.ops import load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from shared.model_files.model_dir import CONFIG
from tests.support.models.packing_ops import PackingOps
from tests.support.models.paged_model import PagedModel
from tests.support.models.published_formats import PUBLISHED
from tests.support.models.quantized_checkpoints import KIMI_INT4, MXFP4, SCHEMES, Scheme, write_quantized
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model

PROMPT = [5, 9, 100, 4, 77, 31, 31, 8]
# The format has groups of 32 input features; the other sizes are not powers of two.
GPT_OSS_SIZES = {"hidden_size": 96, "intermediate_size": 64}
# One group of experts, and groups of 32 inputs in each expert.
KIMI_SIZES = {"hidden_size": 64, "moe_intermediate_size": 96, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}

CASES: dict[str, tuple[str, dict[str, Any], Scheme]] = {
    "gpt-oss, mxfp4": ("GptOssForCausalLM", GPT_OSS_SIZES, MXFP4),
    "Kimi K2, int4 groups": ("DeepseekV3ForCausalLM", KIMI_SIZES, KIMI_INT4),
    "DeepSeek-V3, fp8 blocks": ("DeepseekV3ForCausalLM", {}, SCHEMES["fp8, blocks"]),
    "Qwen3-MoE, int4 groups": ("Qwen3MoeForCausalLM", {}, SCHEMES["compressed int4, groups"]),
    "Mixtral, W8A8": ("MixtralForCausalLM", {}, SCHEMES["compressed int8, W8A8"]),
    "Qwen3-MoE, Quark MXFP4": ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 32}, PUBLISHED["quark mxfp4"]),
    "Mixtral, GPTQ in activation order": ("MixtralForCausalLM", {}, PUBLISHED["gptq, activation order"]),
}


def our_logits(model_dir: Path, backend: str) -> Tensor:
    ops = load_ops(backend)
    paged = PagedModel(load_model(model_dir, ops, torch.float32, lambda _: None).model, ops, num_blocks=8)
    return paged.prefill_all(paged.add(PROMPT))


@torch.no_grad()
def their_logits(model_dir: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    logits: Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_quantized_experts_compute_what_their_values_do(tmp_path: Path, case: str, backend: str) -> None:
    architecture, changes, scheme = CASES[case]
    config = {**next(iter(SMALL_CONFIGS[architecture].values())), **changes}
    plain = write_small_model(build_model(architecture, config), tmp_path / "plain")
    quantized, values = write_quantized(plain, tmp_path, scheme)
    expected = their_logits(values)
    scale = expected.abs().max()
    torch.testing.assert_close(our_logits(quantized, backend), expected, rtol=0, atol=1e-4 * float(scale))
    # Quantisation did change the model.
    assert (their_logits(plain) - expected).abs().max() > 1e-2 * scale


def test_what_is_stored_unquantized_is_read_as_it_is_whatever_the_list_of_such_layers_says(tmp_path: Path) -> None:
    """GLM-5's FP8 checkpoints list `self_attn.indexers_proj`, which no tensor is called."""
    architecture = "GlmMoeDsaForCausalLM"
    plain = write_small_model(build_model(architecture, SMALL_CONFIGS[architecture]["pattern"]), tmp_path / "plain")
    quantized, values = write_quantized(plain, tmp_path, SCHEMES["fp8, blocks"])
    tensors, meant = (load_file(each / "model.safetensors") for each in (quantized, values))
    names = [name for name in tensors if "indexer.weights_proj.weight" in name]
    assert len(names) == 4
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    plain_names = [name for name in names if name.endswith(".weight")]
    save_file({**kept, **{name: meant[name] for name in plain_names}}, quantized / "model.safetensors")
    config = json.loads((quantized / CONFIG).read_text(encoding="utf-8"))
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.0.self_attn.indexers_proj"]
    (quantized / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    expected = their_logits(values)
    torch.testing.assert_close(our_logits(quantized, "cpu"), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("case", "counts"),
    [
        # The rest are routers and the head, in gpt-oss also the attention, in Kimi K2 all but the experts.
        ("gpt-oss, mxfp4", {MatrixFormat.MXFP4: 32, None: 7}),
        ("Qwen3-MoE, int4 groups", {MatrixFormat.INT4: 36, None: 3}),
        ("Kimi K2, int4 groups", {MatrixFormat.INT4: 16, None: 12}),
        ("Mixtral, W8A8", {MatrixFormat.INT8: 36, None: 3}),
        ("Qwen3-MoE, Quark MXFP4", {MatrixFormat.MXFP4: 36, None: 3}),
        # Kernels of experts share rows between matrices, so only the attention is packed.
        ("Mixtral, GPTQ in activation order", {MatrixFormat.INT4: 4, None: 35}),
    ],
)
def test_a_backend_with_kernels_for_a_format_is_given_experts_in_it(
    tmp_path: Path, case: str, counts: dict[MatrixFormat | None, int]
) -> None:
    architecture, changes, scheme = CASES[case]
    config = {**next(iter(SMALL_CONFIGS[architecture].values())), **changes}
    plain = write_small_model(build_model(architecture, config), tmp_path / "plain")
    quantized, _ = write_quantized(plain, tmp_path, scheme)
    ops = PackingOps()
    paged = PagedModel(load_model(quantized, ops, torch.float32, lambda _: None).model, ops, num_blocks=8)
    assert ops.counts == counts
    logits = paged.prefill_all(paged.add(PROMPT))
    torch.testing.assert_close(logits, our_logits(quantized, "reference"), rtol=1e-5, atol=1e-5)


def test_scales_of_mxfp4_experts_that_are_exchanged_are_seen_in_the_output(tmp_path: Path) -> None:
    architecture, changes, scheme = CASES["gpt-oss, mxfp4"]
    config = {**next(iter(SMALL_CONFIGS[architecture].values())), **changes}
    plain = write_small_model(build_model(architecture, config), tmp_path / "plain")
    quantized, values = write_quantized(plain, tmp_path, scheme)
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name].roll(1, dims=1).contiguous()
    save_file(tensors, quantized / "model.safetensors")
    expected = their_logits(values)
    assert (our_logits(quantized, "cpu") - expected).abs().max() > 1e-3 * expected.abs().max()
