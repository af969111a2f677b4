"""Mixtral (arXiv:2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.layers.moe import SparseMlp
from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderConfig, DecoderModel
from services.worker.models.parts.plain_attention import AttentionConfig, AttentionHeads, load_plain_model
from services.worker.models.parts.sparse_mlp import SparseConfig, load_sparse_mlp
from services.worker.ops import RouterScore, RoutingRule

# The default of transformers' configuration.
_ROPE_THETA = 1e6
_EXPERT_NAMES = ("w1", "w3", "w2")


def load_mixtral(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """Load a rank's part of the model; raises as `ModelLoader` says."""
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, shard.context, default_theta=_ROPE_THETA)
    windows = [values.optional_size("sliding_window")] * common.num_layers
    attention = AttentionConfig(AttentionHeads.from_json(values), windows)
    num_chosen = values.size("num_experts_per_tok", default=2)
    sparse = SparseConfig(
        num_experts=values.size("num_local_experts", "num_experts", default=8),
        inner_size=values.size("intermediate_size"),
        rule=RoutingRule(num_chosen, RouterScore.SOFTMAX, renormalizes=True),
    )

    def load_feed_forward(layer: int) -> SparseMlp:
        prefix = f"model.layers.{layer}.block_sparse_moe"
        return load_sparse_mlp(shard, common, prefix, sparse=sparse, names=_EXPERT_NAMES)

    return load_plain_model(shard, common, attention=attention, load_feed_forward=load_feed_forward)
