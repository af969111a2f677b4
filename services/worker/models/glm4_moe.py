"""GLM-4-MoE (GLM-4.5 and 4.6, arXiv:2508.06471): partial rotation, and experts as DeepSeek-V3 has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.models.config import ConfigValues
from services.worker.models.decoder import DecoderConfig, DecoderLayer, DecoderModel, FeedForward, load_mlp
from services.worker.models.mtp import load_mtp, mtp_layers_to_load
from services.worker.models.plain_attention import AttentionConfig, AttentionHeads, load_plain_layer, load_rotary
from services.worker.models.sparse_mlp import SparseConfig, load_sparse_mlp
from services.worker.ops import Ops
from services.worker.weights import ModelWeights

# Where config.json does not say, as transformers' configuration has it.
_PARTIAL_ROTARY_FACTOR = 0.5


def load_glm4_moe(
    config: Mapping[str, Any], weights: ModelWeights, ops: Ops, *, with_mtp: bool = False
) -> DecoderModel:
    """GLM-4-MoE, with its layers for multi-token prediction if they are asked for and stored.

    Raises:
        ModelDirectoryError: configuration and weights do not make a model.
    """
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, default_partial_factor=_PARTIAL_ROTARY_FACTOR)
    mtp_numbers = mtp_layers_to_load(values, common, weights, with_mtp=with_mtp)
    attention = AttentionConfig(
        AttentionHeads.from_json(values),
        [None] * (common.num_layers + len(mtp_numbers)),
        has_qkv_bias=values.flag("attention_bias", default=False),
        has_head_norms=values.flag("use_qk_norm", default=False),
    )
    sparse, num_dense = SparseConfig.corrected_sigmoid(values), values.count("first_k_dense_replace")

    def load_feed_forward(layer: int) -> FeedForward:
        prefix = f"model.layers.{layer}.mlp"
        if layer < num_dense:
            return load_mlp(ops, common, weights, prefix, inner_size=values.size("intermediate_size"))
        return load_sparse_mlp(ops, common, weights, prefix, sparse=sparse)

    def load_layer(layer: int) -> DecoderLayer:
        feed_forward = load_feed_forward(layer)
        return load_plain_layer(ops, common, weights, layer, attention=attention, feed_forward=feed_forward)

    layers = [load_layer(layer) for layer in range(common.num_layers)]
    blocks = [load_layer(layer) for layer in mtp_numbers]
    rotary, kv_layers = load_rotary(ops, common, attention.heads), attention.kv_layers(weights.dtype)
    model = DecoderModel(ops, common, weights, layers=layers, rotary=rotary, kv_layers=kv_layers)
    model.mtp = load_mtp(ops, common, weights, model, blocks=blocks)
    return model
