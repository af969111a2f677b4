"""What config.json says beside the usual: ours and transformers read the same model out of the same directory.

transformers reads it as people do, by `AutoModelForCausalLM.from_pretrained`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.models.config_keys import keys_without_effect
from services.worker.models.loader import load_model
from services.worker.ops import load_ops
from shared.model_files.model_dir import CONFIG
from tests.support.models.multimodal import auto_class, text_of, with_text
from tests.support.models.other_values import OTHER_VALUES
from tests.support.models.parity import TransformersModel, load_paged, make_prompts, wrong_rows
from tests.support.models.small_configs import ARCHITECTURES, SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model

Changes = dict[str, Any]

YARN: Changes = {"factor": 4.0, "original_max_position_embeddings": 64}
SLIDING, FULL = "sliding_attention", "full_attention"
# A change to ... removes the key.
ROPES: dict[str, Changes] = {
    "what cards say to add": {"rope_scaling": {"rope_type": "yarn", "rope_theta": 5000.0, **YARN}},
    "without a base": {"rope_scaling": {"rope_type": "yarn", **YARN}},
    "the base outside": {"rope_scaling": {"rope_type": "yarn", **YARN}, "rope_theta": 5000.0},
    "the older name of the type": {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 5000.0},
    "both names of the type": {"rope_scaling": {"type": "linear", "rope_type": "yarn", **YARN}},
    "the original length outside": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 64,
    },
    "no original length": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "an empty scaling": {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    "only a base": {"rope_parameters": ..., "rope_theta": 5000.0},
    "a base in vain": {"rope_theta": 5000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "nothing": {"rope_parameters": ...},
    "an empty object": {"rope_parameters": {}},
}
# What transformers needs beside the scaling.
REPEATED: dict[str, Changes] = {
    "Ministral3ForCausalLM": {"llama_4_scaling_beta": 0.2},
    "Glm4vMoeForConditionalGeneration": {"mrope_section": [2, 1, 1]},
    "Qwen2VLForConditionalGeneration": {"mrope_section": [2, 3, 3]},
    "Qwen2_5_VLForConditionalGeneration": {"mrope_section": [2, 3, 3]},
}
WINDOWS: dict[str, tuple[str, Changes]] = {
    "a mistral with layer types": ("MistralForCausalLM", {"sliding_window": 9, "layer_types": [SLIDING, FULL]}),
    "a mistral with full layers": ("MistralForCausalLM", {"sliding_window": 9, "layer_types": [FULL, FULL]}),
    "a mistral with null types": ("MistralForCausalLM", {"sliding_window": 9, "layer_types": None}),
    "older names of types": (
        "Qwen3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["attention", SLIDING]},
    ),
    "a null window in use": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0, "layer_types": ...},
    ),
    "a null window of experts": ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "sliding_window": None}),
    "types that a family has not": ("MixtralForCausalLM", {"sliding_window": 9, "layer_types": [FULL, FULL]}),
    "a window that a family has not": ("LlamaForCausalLM", {"sliding_window": 9, "layer_types": [SLIDING, FULL]}),
    "another name of silu": ("LlamaForCausalLM", {"hidden_act": "swish"}),
}


def write_model(directory: Path, architecture: str, changes: Changes) -> Path:
    """The first variant of a family, its config.json changed afterwards."""
    first = next(iter(SMALL_CONFIGS[architecture].values()))
    write_small_model(build_model(architecture, first), directory)
    config = json.loads((directory / CONFIG).read_text())
    text = {name: value for name, value in {**text_of(config), **changes}.items() if value is not ...}
    (directory / CONFIG).write_text(json.dumps(with_text(config, text)))
    return directory


def wrong_logits(directory: Path, architecture: str = "") -> list[int]:
    """The rows of a prompt, longer than windows and original lengths, that differ from transformers'."""
    reader = auto_class(architecture)
    theirs = reader.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    paged, (prompt,) = load_paged(directory, "cpu"), make_prompts((90,))
    return wrong_rows(paged.prefill_all(paged.add(prompt)), TransformersModel(theirs.eval()), prompt)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize("case", ROPES)
def test_rotations_are_those_that_transformers_reads(tmp_path: Path, architecture: str, case: str) -> None:
    assert wrong_logits(write_model(tmp_path, architecture, ROPES[case])) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_takes_the_scaling_that_cards_say_to_add(tmp_path: Path, architecture: str) -> None:
    # Mixtral's own null is one that transformers' scaling does not read.
    changes = {"head_dim": 16} if architecture == "MixtralForCausalLM" else {}
    scaling = ROPES["what cards say to add"]["rope_scaling"] | REPEATED.get(architecture, {})
    directory = write_model(tmp_path, architecture, {"rope_scaling": scaling, **changes})
    assert wrong_logits(directory, architecture) == []


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_and_names_are_those_that_transformers_reads(tmp_path: Path, case: str) -> None:
    assert wrong_logits(write_model(tmp_path, *WINDOWS[case])) == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_without_effect_have_none_in_transformers_either(tmp_path: Path, architecture: str) -> None:
    changes = {key: OTHER_VALUES[key] for key in keys_without_effect(architecture)}
    directory = write_model(tmp_path, architecture, {})
    paged, (prompt,) = load_paged(directory, "cpu"), make_prompts((90,))
    plain = paged.prefill_all(paged.add(prompt))
    write_model(tmp_path, architecture, changes)
    theirs = auto_class(architecture).from_pretrained(directory, dtype=torch.float32)
    assert wrong_rows(plain, TransformersModel(theirs.eval()), prompt) == []


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("stored", ["head that differs", "same head", "only a head", "same head in another type"])
def test_a_stored_head_is_used_as_by_transformers_although_embeddings_are_tied(
    tmp_path: Path, architecture: str, stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, architecture, {"tie_word_embeddings": True})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    if stored == "only a head":
        del tensors["model.embed_tokens.weight"]
    elif stored == "same head":
        tensors["lm_head.weight"] = embedding.clone()
    elif stored == "same head in another type":
        embedding.copy_(embedding.bfloat16())
        tensors["lm_head.weight"] = embedding.bfloat16()
    save_file(tensors, path, metadata={"format": "pt"})
    assert wrong_logits(tmp_path) == []
    assert ("the stored head differs" in caplog.text) == (stored == "head that differs")


def test_a_head_that_differs_by_one_value_is_used(tmp_path: Path) -> None:
    write_model(tmp_path, "LlamaForCausalLM", {"tie_word_embeddings": True})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][7] *= 2
    save_file(tensors, path, metadata={"format": "pt"})
    assert wrong_logits(tmp_path) == []
    assert load_model(tmp_path, load_ops("cpu"), torch.bfloat16, lambda _: None).model.logits_width == 512
