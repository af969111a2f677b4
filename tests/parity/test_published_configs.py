"""Configurations in published (older) spellings are equivalent to those that current transformers writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.model_files.model_dir import CONFIG
from tests.support.models.multimodal import text_of, with_text
from tests.support.models.parity import SmallModels, load_paged, make_prompts
from tests.support.models.small_configs import ARCHITECTURES, SMALL_CONFIGS

# Fields that transformers derives and writes, and published checkpoints lack.
_DERIVED = ("qk_head_dim", "layer_types", "mlp_layer_types", "indexer_types", "transformers_version", "use_cache")
_ROUTING: dict[str, dict[str, str]] = {
    "DeepseekV2ForCausalLM": {"scoring_func": "softmax"},
    "DeepseekV3ForCausalLM": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "DeepseekV32ForCausalLM": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "Glm4MoeLiteForCausalLM": {"topk_method": "noaux_tc"},
    "GlmMoeDsaForCausalLM": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_dtype": "float32"},
    "Kimi_K25ForConditionalGeneration": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
# What is published under another name.
_NAMES = {"Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration"}
_TYPES = {"deepseek_v3": "kimi_k2"}
# What layers' types are derived from.
_PERIODS = ("sliding_window_pattern", "full_attention_interval")


def as_published(config: dict[str, Any], architecture: str, chosen: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with the names of older releases and without derived fields.

    Args:
        config: As written by transformers.
        chosen: The values from which the configuration was made, which are kept.
    """
    rope = dict(config["rope_parameters"])
    published = {name: value for name, value in config.items() if name not in _DERIVED or name in chosen}
    published = {name: value for name, value in published.items() if value is not None}
    del published["rope_parameters"]
    published |= {name: chosen[name] for name in _PERIODS if name in chosen}
    if architecture.startswith("Gemma3"):
        published["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    published["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        published["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    # DeepSeek uses the older name for the rope type.
    kind = rope.pop("rope_type")
    # Without one, gpt-oss has YaRN.
    if kind != "default" or architecture == "GptOssForCausalLM":
        published["rope_scaling"] = {"type" if "deepseek" in config["model_type"] else "rope_type": kind, **rope}
    if "dtype" in published:
        published["torch_dtype"] = published.pop("dtype")
    if architecture == "Qwen3MoeForCausalLM":
        published["num_experts"] = published.pop("num_local_experts")
    if architecture in _ROUTING:
        published = {**_ROUTING[architecture], **published}
        # In transformers it is the dimension of the rotated part.
        published.pop("head_dim", None)
    return published


def as_published_multimodal(config: dict[str, Any], architecture: str, text: dict[str, Any]) -> dict[str, Any]:
    """The whole around the published `text`; Qwen2-VL and 2.5 have all keys at the top, and a rotation by sections."""
    text["model_type"] = _TYPES.get(text["model_type"], text["model_type"])
    config = {**config, "architectures": [_NAMES.get(architecture, architecture)]}
    if not architecture.startswith(("Qwen2VL", "Qwen2_5_VL")):
        return with_text(config, text)
    top = {name: value for name, value in config.items() if name != "text_config"}
    return {**text, **top, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}


@pytest.mark.parametrize(("architecture", "variant"), [(a, v) for a in ARCHITECTURES for v in SMALL_CONFIGS[a]])
def test_an_older_spelling_is_the_same_model(
    small_models: SmallModels, tmp_path: Path, architecture: str, variant: str
) -> None:
    small = small_models.get(architecture, variant)
    directory = Path(shutil.copytree(small.directory, tmp_path / "published"))
    config = json.loads((directory / CONFIG).read_text())
    text = as_published(text_of(config), architecture, SMALL_CONFIGS[architecture][variant])
    published = as_published_multimodal(config, architecture, text) if "text_config" in config else text
    (directory / CONFIG).write_text(json.dumps(published))
    [prompt] = make_prompts((70,))
    ours, same = small.load("cpu"), load_paged(directory, "cpu")
    assert torch.equal(ours.prefill_all(ours.add(prompt)), same.prefill_all(same.add(prompt)))
