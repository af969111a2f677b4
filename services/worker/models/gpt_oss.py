"""gpt-oss (arXiv:2508.10925): attention sinks, every other layer with a window, experts with biases and a clamp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from services.worker.layers.linear import Linear
from services.worker.layers.moe import Router, SparseMlp
from services.worker.models.config import ConfigValues
from services.worker.models.decoder import DecoderConfig, DecoderModel
from services.worker.models.plain_attention import (
    FULL,
    SLIDING,
    AttentionConfig,
    AttentionHeads,
    load_plain_model,
    windows_by_type,
)
from services.worker.models.sparse_mlp import SparseConfig
from services.worker.ops import ExpertWeights, Ops, RouterScore, RoutingRule, SwigluClamp
from services.worker.weights import ModelWeights

# Where config.json does not say, as transformers' configuration has it.
_ROPE_THETA = 150000.0
_HEAD_DIM = 64
_WINDOW = 128
_ALPHA = 1.702
_LIMIT = 7.0


def load_gpt_oss(config: Mapping[str, Any], weights: ModelWeights, ops: Ops) -> DecoderModel:
    """gpt-oss.

    Raises:
        ModelDirectoryError: configuration and weights do not make a model.
    """
    values = ConfigValues(config)
    common = DecoderConfig.from_json(values, default_theta=_ROPE_THETA)
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
        prefix, hidden_size = f"model.layers.{layer}.mlp", common.hidden_size
        names, sizes = [f"{prefix}.router"], [sparse.num_experts]
        logits = Linear.load(ops, weights, names, sizes, in_features=hidden_size, has_bias=True)
        experts = ops.prepare_experts(_read_experts(weights, f"{prefix}.experts", sparse, hidden_size), clamp)
        return SparseMlp(Router(ops, logits, sparse.rule, dtype=weights.dtype), experts)

    return load_plain_model(ops, common, weights, attention=attention, load_feed_forward=load_feed_forward)


def _windows(values: ConfigValues, num_layers: int) -> list[int | None]:
    types = [FULL if layer % 2 else SLIDING for layer in range(num_layers)]
    window = values.optional_size("sliding_window") if "sliding_window" in values.json else _WINDOW
    return windows_by_type(values, window, types)


def _read_experts(
    weights: ModelWeights, prefix: str, sparse: SparseConfig, hidden_size: int
) -> Iterator[ExpertWeights]:
    """The experts of one layer, which are stored as stacks with the input features first."""
    num_experts, inner_size = sparse.num_experts, sparse.inner_size
    gate_up_biases = weights.read(f"{prefix}.gate_up_proj_bias", (num_experts, 2 * inner_size))
    down_biases = weights.read(f"{prefix}.down_proj_bias", (num_experts, hidden_size))
    gate_up_shape, down_shape = (num_experts, hidden_size, 2 * inner_size), (num_experts, inner_size, hidden_size)
    for expert in range(num_experts):
        this_one = slice(expert, expert + 1)
        gate_up = weights.stacked(f"{prefix}.gate_up_proj", gate_up_shape, experts=this_one)[0].T
        down = weights.stacked(f"{prefix}.down_proj", down_shape, experts=this_one)[0].T
        yield ExpertWeights(
            _gate_first(gate_up), down.contiguous(), _gate_first(gate_up_biases[expert]), down_biases[expert]
        )


def _gate_first(gate_up: Tensor) -> Tensor:
    """The even rows, which are the gate's, and then the odd ones, which are up's."""
    return torch.cat((gate_up[::2], gate_up[1::2]))
