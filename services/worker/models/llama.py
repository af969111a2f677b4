"""Llama (arXiv:2302.13971, 2407.21783), SmolLM2, TinyLlama; Mistral (2310.06825); Qwen2 (2407.10671), Qwen2.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderConfig, DecoderModel, FeedForward, load_mlp
from services.worker.models.parts.plain_attention import (
    FULL,
    SLIDING,
    AttentionConfig,
    AttentionHeads,
    load_plain_model,
    windows_by_type,
)

# The defaults of transformers' configurations.
_WINDOW = 4096
_MAX_WINDOW_LAYERS = 28


def load_llama(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """Biases are settings. Raises as `ModelLoader` says."""
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, shard.context)
    has_bias = values.flag("attention_bias", default=False)
    attention = AttentionConfig(
        AttentionHeads.from_json(values),
        [None] * common.num_layers,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )
    return load_dense_model(shard, values, common, attention=attention)


def load_mistral(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """All layers have the same window, none if it is null; with `layer_types`, only those that say so.

    transformers reads a Mistral with `layer_types` as its Ministral. See `ModelLoader`.
    """
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, shard.context)
    window = _window(values)
    types = [FULL if window is None else SLIDING] * common.num_layers
    attention = AttentionConfig(AttentionHeads.from_json(values), windows_by_type(values, window, types))
    return load_dense_model(shard, values, common, attention=attention)


def load_qwen2(
    config: Mapping[str, Any],
    shard: Shard,
    *,
    default_theta: float = 10000.0,
    default_first: int = _MAX_WINDOW_LAYERS,
) -> DecoderModel:
    """Query, key and value have biases, upper layers maybe windows. Raises as `ModelLoader` says.

    Args:
        config: config.json.
        shard: The rank's part.
        default_theta: The base of rotations, where the configuration does not say.
        default_first: The first layer with a window, likewise.
    """
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, shard.context, default_theta=default_theta)
    windows = qwen_windows(values, common.num_layers, default_first=default_first)
    attention = AttentionConfig(AttentionHeads.from_json(values), windows, has_qkv_bias=True)
    return load_dense_model(shard, values, common, attention=attention)


def qwen_windows(values: ConfigValues, num_layers: int, *, default_first: int = _MAX_WINDOW_LAYERS) -> list[int | None]:
    """Windows of Qwen2's and Qwen3's layers, by `layer_types` or else from `max_window_layers` on."""
    window = qwen_window(values)
    first = values.count("max_window_layers", default=default_first)
    types = [SLIDING if window is not None and layer >= first else FULL for layer in range(num_layers)]
    return windows_by_type(values, window, types)


def qwen_window(values: ConfigValues) -> int | None:
    """None if no layer has a window."""
    return _window(values) if values.flag("use_sliding_window", default=False) else None


def _window(values: ConfigValues) -> int | None:
    """A null means none, which an absent value does not."""
    return values.optional_size("sliding_window") if "sliding_window" in values.json else _WINDOW


def load_dense_model(
    shard: Shard, values: ConfigValues, common: DecoderConfig, *, attention: AttentionConfig
) -> DecoderModel:
    """Load a model with equal gated feed-forward networks in all layers."""
    inner_size, has_bias = values.size("intermediate_size"), values.flag("mlp_bias", default=False)

    def load_feed_forward(layer: int) -> FeedForward:
        prefix = f"model.layers.{layer}.mlp"
        return load_mlp(shard, common, prefix, inner_size=inner_size, has_bias=has_bias)

    return load_plain_model(shard, common, attention=attention, load_feed_forward=load_feed_forward)
