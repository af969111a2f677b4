"""The text of multimodal checkpoints: their language model, without the towers for images, video and sound.

Such a checkpoint is published as `…ForConditionalGeneration`: the language model's keys are in `text_config`, its
tensors under a prefix, with towers beside them. To serve another one, add a line to `TEXT_MODELS`; a tower with a new
name is a word in `_TOWERS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Where Qwen says which of a head's columns are rotated by height and width, which is nothing for text.
_IMAGE_ROPE = ("mrope_section", "mrope_interleaved")
_ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
_ROPE_KEYS = (*_ROPE_OBJECTS, "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_PLAIN_ROPES = (None, "default", "mrope")
_TYPE_KEYS = ("rope_type", "type")
# What counts at the top first, since transformers reads it of the whole model.
_OF_WHOLE = ("tie_word_embeddings", "quantization_config", "compression_config", "eos_token_id")

_TOWERS = (
    *("visual", "vision_tower", "vision_model", "embed_vision"),
    *("audio_tower", "embed_audio"),
    *("multi_modal_projector", "mm_projector"),
)
_TOWER = re.compile(rf"(?:model\.)?(?:{'|'.join(_TOWERS)})\.")
# A stored prefix, and what the language model alone calls it; the first that fits counts.
_PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", "model."),
)


@dataclass(frozen=True, slots=True)
class TextModel:
    """The language model of a multimodal architecture."""

    model_types: tuple[str, ...]
    """The values of `model_type` in `text_config` that are served, the one for a configuration without it first."""
    is_tied: bool = False
    """Whether embedding and head are tied where the configuration does not say, as in transformers."""


TEXT_MODELS: Mapping[str, TextModel] = {
    "Gemma3ForConditionalGeneration": TextModel(("gemma3_text",), is_tied=True),
    "Glm4vMoeForConditionalGeneration": TextModel(("glm4v_moe_text",)),
    "KimiK25ForConditionalGeneration": TextModel(("deepseek_v3", "kimi_k2"), is_tied=True),
    # As transformers writes it.
    "Kimi_K25ForConditionalGeneration": TextModel(("deepseek_v3", "kimi_k2"), is_tied=True),
    "Mistral3ForConditionalGeneration": TextModel(("mistral", "ministral3"), is_tied=True),
    # Published without `text_config`: all keys are at the top, with the type of the whole.
    "Qwen2VLForConditionalGeneration": TextModel(("qwen2_vl_text", "qwen2_vl")),
    "Qwen2_5_VLForConditionalGeneration": TextModel(("qwen2_5_vl_text", "qwen2_5_vl")),
    "Qwen3VLForConditionalGeneration": TextModel(("qwen3_vl_text",)),
    "Qwen3VLMoeForConditionalGeneration": TextModel(("qwen3_vl_moe_text",)),
    "Qwen3_5ForConditionalGeneration": TextModel(("qwen3_5_text",)),
    "Qwen3_5MoeForConditionalGeneration": TextModel(("qwen3_5_moe_text",)),
}
"""Models by architecture, as in config.json. Only their text is served."""


def text_values(config: Mapping[str, Any], text_model: TextModel) -> dict[str, Any]:
    """The language model's keys, as a checkpoint of its own would have them, under the architecture of the whole.

    What `text_config` does not say may be said at the top. Where both say it, `text_config` counts, but for what is the
    whole model's (`_OF_WHOLE`), as in transformers.

    Raises:
        ValueError: `text_config` is not an object or of another type, or the top has a scaling of positions that
            transformers would ignore; the message names the key.
    """
    nested = config.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise ValueError(f"text_config is {nested!r}, not an object")
    text = nested or {}
    kind = (text if nested else config).get("model_type", text_model.model_types[0])
    if kind not in text_model.model_types:
        place = "text_config.model_type" if nested else "model_type"
        raise ValueError(f"{place} {kind!r} is not supported; supported: {', '.join(text_model.model_types)}")
    top = {name: value for name, value in config.items() if name != "text_config"}
    if any(text.get(name) is not None for name in _ROPE_KEYS):
        _refuse_ignored_scaling(top, text)
        top = {name: value for name, value in top.items() if name not in _ROPE_KEYS}
    values = {**top, **{name: value for name, value in text.items() if value is not None or name not in top}}
    # A null is a value here: it means that there is no window.
    if "sliding_window" in text:
        values["sliding_window"] = text["sliding_window"]
    values |= {name: top[name] for name in _OF_WHOLE if top.get(name) is not None}
    if values.get("tie_word_embeddings") is None:
        values["tie_word_embeddings"] = text_model.is_tied
    values |= {"architectures": config.get("architectures"), "model_type": kind}
    return with_text_rope(values)


def with_text_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys with the rotation of text: it has one position for time, height and width.

    A text that was taken out of its whole may keep the rotation by sections.
    """
    return {name: _text_rope(value) if name in _ROPE_OBJECTS else value for name, value in config.items()}


def text_name(stored: str) -> str | None:
    """What the language model alone calls a stored tensor; None for a tower's. An unknown name is unchanged."""
    if _TOWER.match(stored):
        return None
    return next((ours + stored.removeprefix(prefix) for prefix, ours in _PREFIXES if stored.startswith(prefix)), stored)


def spellings(name: str) -> tuple[str, ...]:
    """The names that a multimodal checkpoint may have for the language model's module `name`, itself first."""
    path = f"{name}."
    others = (prefix + path.removeprefix(ours) for prefix, ours in _PREFIXES if path.startswith(ours))
    return (name, *(other.removesuffix(".") for other in others))


def _refuse_ignored_scaling(top: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    for name in _ROPE_OBJECTS:
        given = top.get(name)
        if isinstance(given, dict) and _rope_type(given) not in _PLAIN_ROPES and given != text.get(name):
            raise ValueError(f"{name} is set beside text_config, which has its own: set it in text_config")


def _rope_type(values: Mapping[str, Any]) -> object:
    return next((values[name] for name in _TYPE_KEYS if name in values), None)


def _text_rope(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {name: each for name, each in value.items() if name not in _IMAGE_ROPE}
    return kept | {name: "default" for name in _TYPE_KEYS if kept.get(name) == "mrope"}
