from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.model_files.model_dir import (
    CONFIG,
    GENERATION_CONFIG,
    ModelDirectoryError,
    eos_token_ids,
    is_multimodal,
    read_config,
    vocabulary_size,
)
from shared.model_files.text_models import TEXT_MODELS, spellings, text_name

MISTRAL, QWEN, KIMI = (f"{name}ForConditionalGeneration" for name in ("Mistral3", "Qwen3VL", "KimiK25"))
TEXT = {"vocab_size": 99, "hidden_size": 8}


def read(directory: Path, **values: Any) -> dict[str, Any]:
    (directory / CONFIG).write_text(json.dumps({"architectures": [MISTRAL], **values}))
    return read_config(directory)


def refusal(directory: Path, **values: Any) -> str:
    with pytest.raises(ModelDirectoryError) as caught:
        read(directory, **values)
    return str(caught.value)


def test_the_texts_keys_are_at_the_top_of_what_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="mistral3", text_config={**TEXT, "model_type": "ministral3"}, vision_config={})
    assert (config["hidden_size"], config["model_type"]) == (8, "ministral3")
    assert (config["architectures"], is_multimodal(config)) == ([MISTRAL], True)
    assert vocabulary_size(tmp_path) == 99


def test_another_model_is_read_as_it_is(tmp_path: Path) -> None:
    values = {"architectures": ["LlamaForCausalLM"], "text_config": {"hidden_size": 8}, "hidden_size": 9}
    assert read(tmp_path, **values) == values
    assert not is_multimodal(values)


@pytest.mark.parametrize(
    ("top", "text", "expected"),
    [
        ({"quantization_config": {"a": 1}}, {}, ("quantization_config", {"a": 1})),
        ({}, {"quantization_config": {"a": 1}}, ("quantization_config", {"a": 1})),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, ("tie_word_embeddings", False)),
        ({}, {"tie_word_embeddings": False}, ("tie_word_embeddings", False)),
        ({}, {}, ("tie_word_embeddings", True)),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 2}, ("eos_token_id", [2, 3])),
        ({}, {"eos_token_id": 2}, ("eos_token_id", 2)),
        ({"hidden_size": 64}, {}, ("hidden_size", 8)),
        ({"rms_norm_eps": 1e-5}, {}, ("rms_norm_eps", 1e-5)),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": None}, ("rms_norm_eps", 1e-5)),
        ({"sliding_window": 4096}, {"sliding_window": None}, ("sliding_window", None)),
        ({"rope_theta": 5.0}, {}, ("rope_theta", 5.0)),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, {}, ("rope_scaling", {"type": "default"})),
        (
            {},
            {"rope_parameters": {"rope_theta": 5.0, "mrope_interleaved": True}},
            ("rope_parameters", {"rope_theta": 5.0}),
        ),
    ],
)
def test_what_may_be_in_two_places(
    tmp_path: Path, top: dict[str, Any], text: dict[str, Any], expected: tuple[str, object]
) -> None:
    name, value = expected
    assert read(tmp_path, **top, text_config={**TEXT, **text})[name] == value


def test_positions_of_the_top_are_not_mixed_with_those_of_the_text(tmp_path: Path) -> None:
    config = read(tmp_path, rope_theta=5.0, rope_scaling={"type": "mrope"}, text_config={**TEXT, "rope_theta": 7.0})
    assert (config["rope_theta"], "rope_scaling" in config) == (7.0, False)


def test_a_scaling_that_transformers_would_ignore_is_refused_by_name(tmp_path: Path) -> None:
    message = refusal(tmp_path, rope_scaling={"rope_type": "yarn"}, text_config={**TEXT, "rope_theta": 7.0})
    assert message == f"{CONFIG}: rope_scaling is set beside text_config, which has its own: set it in text_config"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_config": [1]}, "text_config is [1], not an object"),
        (
            {"text_config": {"model_type": "mistral4"}},
            "text_config.model_type 'mistral4' is not supported; supported: mi",
        ),
        ({"model_type": "mistral3"}, "model_type 'mistral3' is not supported"),
    ],
)
def test_a_text_that_is_not_served_is_refused_by_name(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    assert refusal(tmp_path, **values).startswith(f"{CONFIG}: {message}")


def test_ends_of_sequences_are_those_of_the_generation_configuration_first(tmp_path: Path) -> None:
    read(tmp_path, eos_token_id=[2, 3], text_config={**TEXT, "eos_token_id": 2})
    assert eos_token_ids(tmp_path) == (2, 3)
    (tmp_path / GENERATION_CONFIG).write_text('{"eos_token_id": 7}')
    assert eos_token_ids(tmp_path) == (7,)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.visual.weight", "model.layers.0.visual.weight"),
        ("model.unknown.weight", "model.unknown.weight"),
        ("visualizer.weight", "visualizer.weight"),
        ("visual.blocks.0.attn.qkv.weight", None),
        ("model.visual.merger.norm.weight", None),
        ("vision_tower.patch_conv.weight", None),
        ("model.vision_tower.patch_conv.weight", None),
        ("audio_tower.layers.0.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
        ("mm_projector.proj.0.bias", None),
    ],
)
def test_a_stored_tensor_is_the_texts_or_a_towers_by_its_name(stored: str, name: str | None) -> None:
    assert text_name(stored) == name


def test_a_module_is_known_by_the_name_that_any_of_its_tensors_may_have() -> None:
    for module in ("model.layers.0.mlp.up_proj", "lm_head"):
        names = spellings(module)
        assert names[0] == module
        assert {text_name(f"{name}.weight") for name in names} == {f"{module}.weight"}
    assert len(spellings("model.norm")) == 4


def test_every_text_has_a_type() -> None:
    assert all(model.model_types for model in TEXT_MODELS.values())
