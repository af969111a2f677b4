"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with mixtures of experts in some or all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.models.config import ConfigValues
from services.worker.models.decoder import DecoderConfig, DecoderModel, FeedForward, load_mlp
from services.worker.models.llama import qwen_window
from services.worker.models.plain_attention import AttentionConfig, AttentionHeads, load_plain_model
from services.worker.models.sparse_mlp import SparseConfig, load_sparse_mlp
from services.worker.ops import Ops, RouterScore, RoutingRule
from services.worker.weights import ModelWeights


def load_qwen3_moe(config: Mapping[str, Any], weights: ModelWeights, ops: Ops) -> DecoderModel:
    """Qwen3-MoE.

    Raises:
        ModelDirectoryError: configuration and weights do not make a model.
    """
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values)
    has_bias = values.flag("attention_bias", default=False)
    attention = AttentionConfig(
        AttentionHeads.from_json(values),
        [qwen_window(values)] * common.num_layers,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_head_norms=True,
    )
    sparse, sparse_layers = _read_sparse(values), _sparse_layers(values, common.num_layers)

    def load_feed_forward(layer: int) -> FeedForward:
        prefix = f"model.layers.{layer}.mlp"
        if layer in sparse_layers:
            return load_sparse_mlp(ops, common, weights, prefix, sparse=sparse)
        return load_mlp(ops, common, weights, prefix, inner_size=values.size("intermediate_size"))

    return load_plain_model(ops, common, weights, attention=attention, load_feed_forward=load_feed_forward)


def _read_sparse(values: ConfigValues) -> SparseConfig:
    rule = RoutingRule(
        num_chosen=values.size("num_experts_per_tok"),
        score=RouterScore.SOFTMAX,
        renormalizes=values.flag("norm_topk_prob", default=False),
    )
    num_experts = values.size("num_experts", "num_local_experts")
    return SparseConfig(num_experts=num_experts, inner_size=values.size("moe_intermediate_size"), rule=rule)


def _sparse_layers(values: ConfigValues, num_layers: int) -> frozenset[int]:
    """The layers that have experts: every `decoder_sparse_step`-th, but not those in `mlp_only_layers`."""
    step = values.size("decoder_sparse_step", default=1)
    return frozenset(range(step - 1, num_layers, step)) - frozenset(values.counts("mlp_only_layers"))
