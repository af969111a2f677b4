"""Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL (2502.13923) and Qwen3-VL (2511.21631), of which the text is served.

A token of text has one position for time, height and width, so that a rotation by sections is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.llama import load_dense_model, load_qwen2
from services.worker.models.parts.decoder import DecoderConfig, DecoderModel, FeedForward
from services.worker.models.parts.plain_attention import FULL, AttentionConfig, AttentionHeads, load_plain_model
from services.worker.models.parts.sparse_mlp import FeedForwardConfig, SparseConfig
from services.worker.models.qwen3_moe import moe_dense_layers
from services.worker.ops import RouterScore, RoutingRule

# The defaults of transformers' configurations.
_THETA_OF_2 = 1000000.0
_MAX_WINDOW_LAYERS = 80
_THETA_OF_3 = 500000.0
_HEAD_DIM = 128


def load_qwen2_vl(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """Load a rank's part of the model, a Qwen2 in both versions; raises as `ModelLoader` says."""
    return load_qwen2(config, shard, default_theta=_THETA_OF_2, default_first=_MAX_WINDOW_LAYERS)


def load_qwen3_vl(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """A Qwen3 without windows. Raises as `ModelLoader` says."""
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, shard.context, default_theta=_THETA_OF_3)
    attention = _attention(values, common, default_head_dim=_HEAD_DIM)
    return load_dense_model(shard, values, common, attention=attention)


def load_qwen3_vl_moe(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """A Qwen3-MoE without windows that always renormalises, its experts in stacks. Raises as `ModelLoader` says."""
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, shard.context, default_theta=_THETA_OF_3)
    values.only("norm_topk_prob", True)
    rule = RoutingRule(values.size("num_experts_per_tok"), RouterScore.SOFTMAX, renormalizes=True)
    num_experts, inner_size = values.size("num_experts", "num_local_experts"), values.size("moe_intermediate_size")
    feed_forward = FeedForwardConfig.from_json(
        values,
        moe_dense_layers(values, common.num_layers),
        SparseConfig(num_experts, inner_size, rule, has_stacks=True),
    )

    def load_feed_forward(layer: int) -> FeedForward:
        return feed_forward.load(shard, common, layer)

    attention = _attention(values, common)
    return load_plain_model(shard, common, attention=attention, load_feed_forward=load_feed_forward)


def _attention(values: ConfigValues, common: DecoderConfig, *, default_head_dim: int | None = None) -> AttentionConfig:
    values.only("layer_types", [FULL] * common.num_layers)
    has_bias = values.flag("attention_bias", default=False)
    return AttentionConfig(
        AttentionHeads.from_json(values, default_head_dim=default_head_dim),
        [None] * common.num_layers,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_head_norms=True,
    )
