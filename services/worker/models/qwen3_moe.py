"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with experts in some or all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.llama import qwen_window
from services.worker.models.parts.decoder import DecoderConfig, DecoderModel, FeedForward
from services.worker.models.parts.plain_attention import AttentionConfig, AttentionHeads, load_plain_model
from services.worker.models.parts.sparse_mlp import FeedForwardConfig, SparseConfig
from services.worker.ops import RouterScore, RoutingRule


def load_qwen3_moe(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """Load a rank's part of the model; raises as `ModelLoader` says."""
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, shard.context)
    has_bias = values.flag("attention_bias", default=False)
    attention = AttentionConfig(
        AttentionHeads.from_json(values),
        [qwen_window(values)] * common.num_layers,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_head_norms=True,
    )
    dense_layers = moe_dense_layers(values, common.num_layers)
    feed_forward = FeedForwardConfig.from_json(values, dense_layers, _read_sparse(values))

    def load_feed_forward(layer: int) -> FeedForward:
        return feed_forward.load(shard, common, layer)

    return load_plain_model(shard, common, attention=attention, load_feed_forward=load_feed_forward)


def _read_sparse(values: ConfigValues) -> SparseConfig:
    rule = RoutingRule(
        num_chosen=values.size("num_experts_per_tok"),
        score=RouterScore.SOFTMAX,
        renormalizes=values.flag("norm_topk_prob", default=False),
    )
    num_experts = values.size("num_experts", "num_local_experts")
    return SparseConfig(num_experts=num_experts, inner_size=values.size("moe_intermediate_size"), rule=rule)


def moe_dense_layers(values: ConfigValues, num_layers: int) -> frozenset[int]:
    """All layers except every `decoder_sparse_step`-th one, plus those in `mlp_only_layers`."""
    step = values.size("decoder_sparse_step", default=1)
    sparse_layers = frozenset(range(step - 1, num_layers, step)) - frozenset(values.counts("mlp_only_layers"))
    return frozenset(range(num_layers)) - sparse_layers
