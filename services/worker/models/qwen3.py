"""Qwen3 (arXiv:2505.09388): Qwen2 with norms on query and key heads, and optional biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.llama import load_dense_model, qwen_windows
from services.worker.models.parts.decoder import DecoderConfig, DecoderModel
from services.worker.models.parts.plain_attention import AttentionConfig, AttentionHeads

# The default of transformers' configuration.
_HEAD_DIM = 128


def load_qwen3(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """Load a rank's part of the model; raises as `ModelLoader` says."""
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, shard.context)
    has_bias = values.flag("attention_bias", default=False)
    attention = AttentionConfig(
        AttentionHeads.from_json(values, default_head_dim=_HEAD_DIM),
        qwen_windows(values, common.num_layers),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_head_norms=True,
    )
    return load_dense_model(shard, values, common, attention=attention)
