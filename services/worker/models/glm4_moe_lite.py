"""GLM-4-MoE-Lite (GLM-4.7-Flash): DeepSeek-V3's layers, of which only the first has no experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.deepseek_v3 import load_like_deepseek_v3
from services.worker.models.parts.decoder import DecoderModel

_NUM_DENSE_LAYERS = 1
# The defaults of transformers' configuration.
_DEFAULTS: Mapping[str, Any] = {
    "first_k_dense_replace": _NUM_DENSE_LAYERS,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
}


def load_glm4_moe_lite(config: Mapping[str, Any], shard: Shard, *, with_mtp: bool = False) -> DecoderModel:
    """Load a rank's part of the model; `with_mtp` adds the layers that draft."""
    values = ConfigValues(config, _DEFAULTS)
    # In transformers it is another name of this size.
    values.only("head_dim", values.size("qk_rope_head_dim"))
    if "mlp_layer_types" not in values:
        # transformers ignores it, other programs do not: what the publisher meant is unknown.
        values.only("first_k_dense_replace", _NUM_DENSE_LAYERS)
    return load_like_deepseek_v3(values, shard, with_mtp=with_mtp)
