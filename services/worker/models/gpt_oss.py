"""gpt-oss (arXiv:2508.10925): attention sinks, a window in every other layer, experts with biases and a clamp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from services.worker.layers.linear import Linear
from services.worker.layers.moe import ReadExpert, Router, SparseMlp
from services.worker.layers.shard import Part, Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderConfig, DecoderModel
from services.worker.models.parts.plain_attention import (
    FULL,
    SLIDING,
    AttentionConfig,
    AttentionHeads,
    load_plain_model,
    windows_by_type,
)
from services.worker.models.parts.sparse_mlp import SparseConfig, load_routed_experts
from services.worker.ops import ExpertWeights, RouterScore, RoutingRule, SwigluClamp
from services.worker.ops.matrix_rows import take_rows
from services.worker.weights.model_weights import ModelWeights

# The defaults of transformers' configuration.
_ROPE_THETA = 150000.0
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_HEAD_DIM = 64
_WINDOW = 128
_ALPHA = 1.702
_LIMIT = 7.0


def load_gpt_oss(config: Mapping[str, Any], shard: Shard) -> DecoderModel:
    """Load a rank's part of the model; raises as `ModelLoader` says."""
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, shard.context, default_theta=_ROPE_THETA, default_rope=_ROPE)
    has_bias = values.flag("attention_bias", default=True)
    attention = AttentionConfig(
        AttentionHeads.from_json(values, default_head_dim=_HEAD_DIM),
        _windows(values, common.num_layers),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_sinks=True,
    )
    sparse = SparseConfig(
        num_experts=values.size("num_local_experts", "num_experts"),
        inner_size=values.size("intermediate_size"),
        rule=RoutingRule(values.size("num_experts_per_tok"), RouterScore.LOGIT),
    )
    clamp = SwigluClamp(values.number("swiglu_alpha", default=_ALPHA), values.number("swiglu_limit", default=_LIMIT))

    def load_feed_forward(layer: int) -> SparseMlp:
        weights, prefix = shard.weights, f"model.layers.{layer}.mlp"
        router = weights.dense(f"{prefix}.router", (sparse.num_experts, common.hidden_size))
        bias = weights.read(f"{prefix}.router.bias", (sparse.num_experts,))
        logits = Linear(shard.ops, router, weights.dtype, bias)
        read = _expert_reader(weights, f"{prefix}.experts", sparse, common.hidden_size)
        experts = load_routed_experts(shard, sparse, read, clamp=clamp)
        return SparseMlp(Router(shard.ops, logits, sparse.rule, dtype=weights.dtype), experts)

    return load_plain_model(shard, common, attention=attention, load_feed_forward=load_feed_forward)


def _windows(values: ConfigValues, num_layers: int) -> list[int | None]:
    types = [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
    window = values.optional_size("sliding_window") if "sliding_window" in values.json else _WINDOW
    return windows_by_type(values, window, types)


def _expert_reader(weights: ModelWeights, prefix: str, sparse: SparseConfig, hidden_size: int) -> ReadExpert:
    """Experts are stored as stacks, input features first."""
    num_experts, inner_size = sparse.num_experts, sparse.inner_size
    gate_up_biases = weights.read(f"{prefix}.gate_up_proj_bias", (num_experts, 2 * inner_size))
    down_biases = weights.read(f"{prefix}.down_proj_bias", (num_experts, hidden_size))
    gate_up_shape, down_shape = (num_experts, hidden_size, 2 * inner_size), (num_experts, inner_size, hidden_size)

    def read(expert: int, inner: Part) -> ExpertWeights:
        both = inner.times(2).run
        gate_up = weights.stacked(f"{prefix}.gate_up_proj", gate_up_shape, expert, rows=both)
        down = weights.stacked(f"{prefix}.down_proj", down_shape, expert, columns=inner.run)
        # Stored in turn: even rows are the gate's, odd rows up's.
        gate_first = torch.arange(2 * len(inner), device=weights.device).view(-1, 2).T.flatten()
        return ExpertWeights(
            take_rows(gate_up, gate_first),
            down,
            gate_up_biases[expert, both][gate_first],
            None if inner.start else down_biases[expert],
        )

    return read
