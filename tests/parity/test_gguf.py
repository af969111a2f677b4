"""Models of every architecture through GGUF, as llama.cpp's converter writes it: what is imported computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.weights.gguf_import.conversion import convert
from tests.support.models.gguf_export import ARCHS, export_gguf
from tests.support.models.parity import TransformersModel, load_paged, make_prompts, wrong_rows
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.models.small_mtp import make_small_mtp_model

# What each is told in a way of its own; the first variant is the default.
VARIANTS = {
    "DeepseekV2ForCausalLM": ["plain", "query-lora", "group-limited"],
    "DeepseekV3ForCausalLM": ["plain", "no-query-lora", "yarn-rope"],
    "Gemma3ForCausalLM": ["published-pattern"],
    "Glm4MoeForCausalLM": ["plain", "query-key-norms", "quarter-rotary-tied"],
    "GptOssForCausalLM": ["plain", "default-rope-tied"],
    "LlamaForCausalLM": ["tied", "wide-heads-linear-rope", "llama3-rope", "yarn-rope"],
    "Qwen3MoeForCausalLM": ["renormalised"],
    "Qwen3_5ForConditionalGeneration": ["plain", "wide-heads-tied"],
}
# What GGUF has no key for: the number by which llama.cpp scales queries, and two temperatures that differ.
SILENT: dict[tuple[str, str], dict[str, Any]] = {
    ("Gemma3ForCausalLM", "published-pattern"): {"query_pre_attn_scalar": 16},
    ("DeepseekV3ForCausalLM", "yarn-rope"): {
        "rope_parameters": SMALL_CONFIGS["DeepseekV3ForCausalLM"]["yarn-rope"]["rope_parameters"] | {"mscale": 0.7}
    },
}


def build(architecture: str, variant: str, directory: Path, **changes: Any) -> TransformersModel:
    """A small model, of which a checkpoint is written."""
    values = {**SMALL_CONFIGS[architecture][variant], **SILENT.get((architecture, variant), {}), **changes}
    model = build_model(architecture, values)
    write_small_model(model, directory)
    return TransformersModel(model)


def check(model_dir: Path, theirs: TransformersModel) -> None:
    paged = load_paged(model_dir, "cpu")
    for prompt in make_prompts((1, 90)):
        assert wrong_rows(paged.prefill_all(paged.add(prompt)), theirs, prompt) == []


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        (architecture, variant)
        for architecture in ARCHS
        for variant in VARIANTS.get(architecture, [next(iter(SMALL_CONFIGS[architecture]))])
    ],
)
def test_an_imported_model_computes_what_the_exported_one_does(tmp_path: Path, architecture: str, variant: str) -> None:
    theirs = build(architecture, variant, tmp_path / "small")
    export_gguf(tmp_path / "small", tmp_path / "small.gguf")
    convert(tmp_path / "small.gguf", tmp_path / "model")
    check(tmp_path / "model", theirs)


@pytest.mark.parametrize("architecture", ["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"])
def test_layers_may_have_their_types_in_any_order(tmp_path: Path, architecture: str) -> None:
    # Unlike any interval's.
    kinds = ["full_attention", "linear_attention", "full_attention", "full_attention", "linear_attention"]
    theirs = build(architecture, "plain", tmp_path / "small", layer_types=kinds, num_hidden_layers=len(kinds))
    export_gguf(tmp_path / "small", tmp_path / "small.gguf")
    convert(tmp_path / "small.gguf", tmp_path / "model")
    check(tmp_path / "model", theirs)


def test_one_matrix_of_all_projections_is_divided_to_the_same_ones(tmp_path: Path) -> None:
    build("Qwen3NextForCausalLM", "plain", tmp_path / "small")
    for name, mixes in (("old", True), ("new", False)):
        export_gguf(tmp_path / "small", tmp_path / f"{name}.gguf", mixes_heads=mixes)
    assert convert(tmp_path / "old.gguf", tmp_path / "old") == convert(tmp_path / "new.gguf", tmp_path / "new")


def test_a_layer_that_drafts_has_the_names_of_its_family(tmp_path: Path) -> None:
    make_small_mtp_model("Qwen3NextForCausalLM", "plain", tmp_path / "small")
    export_gguf(tmp_path / "small", tmp_path / "small.gguf")
    convert(tmp_path / "small.gguf", tmp_path / "model")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "small"))
    names = {name for name in expected if name.startswith("mtp.")}
    assert {name for name in found if name.startswith("mtp.")} == names
    for name in names:
        # A norm's weight had its 1 added in between.
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6 if "norm" in name else 0)
    options = LoadOptions(with_mtp=True)
    loaded = load_model(tmp_path / "model", load_ops("cpu"), torch.float32, lambda _: None, options=options)
    assert loaded.model.mtp is not None


def test_layers_that_draft_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    make_small_mtp_model("Glm4MoeForCausalLM", "plain", tmp_path / "small", num_mtp_layers=2)
    export_gguf(tmp_path / "small", tmp_path / "small.gguf")
    convert(tmp_path / "small.gguf", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (2, 2)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "small"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_projection_from_latents_that_is_not_divided_is_the_same(tmp_path: Path) -> None:
    build("DeepseekV2ForCausalLM", "plain", tmp_path / "small")
    for name, divides in (("old", False), ("new", True)):
        export_gguf(tmp_path / "small", tmp_path / f"{name}.gguf", divides_latents=divides)
    assert convert(tmp_path / "old.gguf", tmp_path / "old") == convert(tmp_path / "new.gguf", tmp_path / "new")


@pytest.mark.parametrize("attention_kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
def test_mxfp4_stays_packed_in_the_order_of_hugging_face(tmp_path: Path, attention_kind: Kind) -> None:
    build("GptOssForCausalLM", "plain", tmp_path / "small", hidden_size=64, intermediate_size=32)
    export_gguf(tmp_path / "small", tmp_path / "small.gguf", kind=Kind.MXFP4, attention_kind=attention_kind)
    convert(tmp_path / "small.gguf", tmp_path / "packed")
    convert(tmp_path / "small.gguf", tmp_path / "plain", keeps_formats=False)
    quantization = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    if attention_kind is Kind.F32:
        assert quantization == {"quant_method": "mxfp4"}
    else:
        assert (quantization["quant_method"], quantization["stacks"]) == ("gguf", "mxfp4")
        assert "model.layers.1.self_attn.o_proj" in quantization["layers"]["Q8_0"]
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape[1:] == (64, 2, 16)
    check(tmp_path / "packed", TransformersModel(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")))
