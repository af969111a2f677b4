"""transformers' configurations of small models, multimodal ones with the smallest towers that can be built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from shared.model_files.text_models import TEXT_MODELS

_QWEN_3_5_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
}
_QWEN_3_TOWER = {**_QWEN_3_5_TOWER, "deepstack_visual_indexes": [0]}
_TOWERS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "Glm4vMoeForConditionalGeneration": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "image_size": 28,
    },
    "Kimi_K25ForConditionalGeneration": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "Mistral3ForConditionalGeneration": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
    },
    "Qwen2VLForConditionalGeneration": {"depth": 1, "embed_dim": 16, "num_heads": 2},
    "Qwen2_5_VLForConditionalGeneration": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "fullatt_block_indexes": [0],
    },
    "Qwen3VLForConditionalGeneration": _QWEN_3_TOWER,
    "Qwen3VLMoeForConditionalGeneration": _QWEN_3_TOWER,
    "Qwen3_5ForConditionalGeneration": _QWEN_3_5_TOWER,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_3_5_TOWER,
}
# What Kimi's projection calls the width of its tower.
_TOPS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 1},
    "Kimi_K25ForConditionalGeneration": {"projection_hidden_size": 16},
}
_OUTPUT_SIZES = {name: "out_hidden_size" for name in _TOWERS if name.startswith(("Glm", "Qwen"))}
_OUTPUT_SIZES["Qwen2VLForConditionalGeneration"] = "hidden_size"
# The text's type, where there are several.
_TYPE = "model_type"


def is_multimodal(architecture: str) -> bool:
    """Whether `SMALL_CONFIGS` has the values of a text within another model."""
    return architecture in TEXT_MODELS


def make_config(architecture: str, values: Mapping[str, Any]) -> Any:
    """The configuration with these values, of a multimodal model's text; see `build_model`."""
    config_class = getattr(transformers, architecture).config_class
    if not is_multimodal(architecture):
        return config_class(**values)
    tower = dict(_TOWERS[architecture])
    if architecture in _OUTPUT_SIZES:
        tower[_OUTPUT_SIZES[architecture]] = values["hidden_size"]
    return config_class(
        text_config={_TYPE: TEXT_MODELS[architecture].model_types[0], **values},
        vision_config=tower,
        tie_word_embeddings=values["tie_word_embeddings"],
        **_TOPS.get(architecture, {}),
    )


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json."""
    return dict(config.get("text_config", config))


def with_text(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json with another language model's part."""
    return {**config, "text_config": dict(text)} if "text_config" in config else dict(text)


def auto_class(architecture: str) -> Any:
    """What people read such a checkpoint with."""
    return (
        transformers.AutoModelForImageTextToText if is_multimodal(architecture) else transformers.AutoModelForCausalLM
    )


def published_name(name: str) -> str:
    """A tensor's name in published files: transformers 5.23 writes the layers of Kimi's text as blocks."""
    return name.replace("language_model.model.blocks.", "language_model.model.layers.")
