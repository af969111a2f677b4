"""GLM-4-MoE (GLM-4.5 and 4.6, arXiv:2508.06471): partial rotation, and experts as in DeepSeek-V3.

Of GLM-4.5V and 4.6V (arXiv:2507.01006) the text is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderConfig, DecoderLayer, DecoderModel
from services.worker.models.parts.mtp import load_mtp, mtp_layers_to_load
from services.worker.models.parts.plain_attention import AttentionConfig, AttentionHeads, load_plain_layer, load_rotary
from services.worker.models.parts.sparse_mlp import FeedForwardConfig, SparseConfig

# The defaults of transformers' configurations.
_PARTIAL_ROTARY_FACTOR = 0.5
_OF_TEXT: Mapping[str, Any] = {"attention_bias": True}


def load_glm4_moe(config: Mapping[str, Any], shard: Shard, *, with_mtp: bool = False) -> DecoderModel:
    """Load a rank's part of the model; `with_mtp` adds the layers that draft."""
    return _load(ConfigValues(config), shard, with_mtp=with_mtp)


def load_glm4v_moe(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """Load a rank's part of the text, whose heads have no norms and which has no layers that draft."""
    values = ConfigValues(config, _OF_TEXT)
    values.only("use_qk_norm", False)
    return _load(values, shard, with_mtp=False)


def _load(values: ConfigValues, shard: Shard, *, with_mtp: bool) -> DecoderModel:
    common = DecoderConfig.from_json(values, shard.context, default_partial_factor=_PARTIAL_ROTARY_FACTOR)
    mtp_numbers = mtp_layers_to_load(values, common, shard.weights, with_mtp=with_mtp)
    attention = AttentionConfig(
        AttentionHeads.from_json(values),
        [None] * (common.num_layers + len(mtp_numbers)),
        has_qkv_bias=values.flag("attention_bias", default=False),
        has_head_norms=values.flag("use_qk_norm", default=False),
    )
    num_dense = min(values.count("first_k_dense_replace"), common.num_layers + len(mtp_numbers))
    sparse = SparseConfig.corrected_sigmoid(values)
    feed_forward = FeedForwardConfig.from_json(values, frozenset(range(num_dense)), sparse)

    def load_layer(layer: int) -> DecoderLayer:
        mlp = feed_forward.load(shard, common, layer)
        return load_plain_layer(shard, common, layer, attention=attention, feed_forward=mlp)

    layers = [load_layer(layer) for layer in range(common.num_layers)]
    blocks = [load_layer(layer) for layer in mtp_numbers]
    rotary, kv_layers = load_rotary(shard, common, attention.heads), attention.kv_layers(shard, common.context_length)
    model = DecoderModel(shard, common, layers=layers, rotaries=[rotary] * len(layers), kv_layers=kv_layers)
    model.mtp = load_mtp(shard, common, model, blocks=blocks)
    return model
