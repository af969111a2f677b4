"""Ministral 3: Llama with YaRN, and queries that grow with the logarithm of their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.llama import load_dense_model
from services.worker.models.parts.decoder import DecoderConfig, DecoderModel
from services.worker.models.parts.plain_attention import (
    FULL,
    SLIDING,
    AttentionConfig,
    AttentionHeads,
    windows_by_type,
)
from shared.model_files.model_dir import ModelDirectoryError

# The defaults of transformers' configuration.
_HEAD_DIM = 128
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def load_ministral3(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """Load a rank's part of the model; raises as `ModelLoader` says."""
    values = ConfigValues(config)
    if not any(name in values for name in ("rope_scaling", "rope_parameters")):
        # transformers does not read it then.
        values.only("rope_theta", _ROPE["rope_theta"])
    common = DecoderConfig.from_json(values, shard.context, default_rope=_ROPE)
    attention = AttentionConfig(
        AttentionHeads.from_json(values, default_head_dim=_HEAD_DIM),
        _windows(values, common.num_layers),
        query_scales=_query_scales(values, common.context_length).to(shard.weights.device, shard.weights.dtype),
    )
    return load_dense_model(shard, values, common, attention=attention)


def _windows(values: ConfigValues, num_layers: int) -> list[int | None]:
    """All layers have the window, if there is one; transformers does not read `layer_types` here."""
    window = values.optional_size("sliding_window")
    windows = [window] * num_layers
    if windows_by_type(values, window, [FULL if window is None else SLIDING] * num_layers) != windows:
        raise ModelDirectoryError("config.json: layer_types differ, but all layers of this architecture are alike")
    return windows


def _query_scales(values: ConfigValues, context_length: int) -> Tensor:
    """1 + beta * ln(1 + floor(position / original length)), [context_length] float32.

    Source: transformers 5, `get_llama_4_attn_scale` in modeling_ministral3.py; Llama 4 has it too.
    """
    rope = ConfigValues(values.json.get("rope_scaling") or values.json.get("rope_parameters") or _ROPE)
    name = "original_max_position_embeddings"
    beta, original = rope.number("llama_4_scaling_beta"), (values if name in values else rope).size(name)
    turns = torch.arange(context_length).div(original, rounding_mode="floor")
    return 1 + beta * torch.log(1 + turns.float())
