"""DeepSeek-V2 (arXiv:2405.04434) and V2-Lite: latent attention, and experts routed by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.deepseek import load_deepseek, read_dense_layers
from services.worker.models.parts.decoder import DecoderConfig, DecoderModel
from services.worker.models.parts.latent_attention import LatentAttentionConfig
from services.worker.models.parts.sparse_mlp import FeedForwardConfig, SparseConfig, read_groups
from services.worker.ops import RouterScore, RoutingRule
from shared.model_files.model_dir import ModelDirectoryError


def load_deepseek_v2(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """Load a rank's part of the model; raises as `ModelLoader` says."""
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, shard.context)
    has_bias = values.flag("mlp_bias", default=False)
    dense_layers = read_dense_layers(values, common.num_layers, default_count=0)
    sparse = _read_sparse(values, has_shared_bias=has_bias)
    feed_forward = FeedForwardConfig.from_json(values, dense_layers, sparse, has_dense_bias=has_bias)
    attention = LatentAttentionConfig.from_json(values, common)
    return load_deepseek(shard, common, attention=attention, feed_forward=feed_forward)


def _read_sparse(values: ConfigValues, *, has_shared_bias: bool) -> SparseConfig:
    values.choice("scoring_func", ("softmax",), default="softmax")
    if values.flag("norm_topk_prob", default=False):
        # DeepSeek's code divides by the sum, transformers does not; no checkpoint sets it.
        raise ModelDirectoryError("config.json: norm_topk_prob is not supported in DeepSeek-V2")
    method = values.choice("topk_method", ("greedy", "group_limited_greedy"), default="greedy")
    inner_size = values.size("moe_intermediate_size")
    rule = RoutingRule(
        num_chosen=values.size("num_experts_per_tok"),
        score=RouterScore.SOFTMAX,
        groups=None if method == "greedy" else read_groups(values, num_scoring=1),
        scale=values.number("routed_scaling_factor", default=1.0),
    )
    return SparseConfig(
        num_experts=values.size("n_routed_experts", "num_experts"),
        inner_size=inner_size,
        rule=rule,
        router_dtype=torch.float32,
        shared_size=values.count("n_shared_experts", default=0) * inner_size,
        has_shared_bias=has_shared_bias,
    )
