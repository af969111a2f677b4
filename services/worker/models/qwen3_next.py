"""Qwen3-Next: gated delta rules (arXiv:2412.06464) in three of four layers, gated attention, and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from services.worker.layers.context_limit import ContextLimit
from services.worker.layers.linear import Linear
from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.gemma3 import read_offset_norm
from services.worker.models.parts.decoder import (
    DecoderConfig,
    DecoderLayer,
    DecoderModel,
    FeedForward,
    layer_name,
    load_mlp,
)
from services.worker.models.parts.mtp import has_own_mtp, load_own_mtp
from services.worker.models.parts.plain_attention import AttentionConfig, AttentionHeads, load_attention
from services.worker.models.parts.recurrent import ReadProjections, load_hybrid_model, read_mixed
from services.worker.models.parts.sparse_mlp import SparseConfig, load_sparse_mlp
from services.worker.models.qwen3_moe import moe_dense_layers
from services.worker.ops import RouterScore, RoutingRule
from services.worker.weights.quantization.gguf_blocks import GROUPED, HEAD_ORDER

# The defaults of transformers' configuration.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}
_PARTIAL_FACTOR = 0.25


def load_qwen3_next(config: Mapping[str, Any], shard: Shard, *, with_mtp: bool = False) -> DecoderModel:
    """Load a rank's part of the model; raises as `ModelLoader` says. `with_mtp` adds the layer that drafts."""
    values = ConfigValues(config, _DEFAULTS)
    common = read_common(values, shard.context)
    has_experts = values.count("num_experts") > 0
    dense_layers = moe_dense_layers(values, common.num_layers) if has_experts else range(common.num_layers)
    renormalizes = values.flag("norm_topk_prob", default=True)
    # Projections are stored by key head.
    values.only(HEAD_ORDER, GROUPED)

    def load_feed_forward(layer: int | None, prefix: str) -> FeedForward:
        is_dense = not has_experts if layer is None else layer in dense_layers
        if is_dense:
            return load_mlp(shard, common, prefix, inner_size=values.size("intermediate_size"))
        return load_gated_sparse_mlp(shard, values, common, prefix, renormalizes=renormalizes)

    return load_gated_model(
        shard, values, common, read=read_mixed, load_feed_forward=load_feed_forward, with_mtp=with_mtp
    )


def read_common(values: ConfigValues, context: ContextLimit) -> DecoderConfig:
    """The common values, with norms that are stored without their 1."""
    common = DecoderConfig.from_json(values, context, default_partial_factor=_PARTIAL_FACTOR)
    return replace(common, read_norm=read_offset_norm)


def load_gated_model(
    shard: Shard,
    values: ConfigValues,
    config: DecoderConfig,
    *,
    read: ReadProjections,
    load_feed_forward: Callable[[int | None, str], FeedForward],
    with_mtp: bool,
) -> DecoderModel:
    """Load a model whose attention is gated; see `load_hybrid_model`.

    Args:
        load_feed_forward: Gets a layer's number, None for the one that drafts, and the name of its network.
        with_mtp: Whether to load the layer that drafts, if it is stored. It has attention.
    """
    has_mtp = has_own_mtp(values, shard.weights, with_mtp=with_mtp)
    # transformers does not read it: another value would be another model.
    values.only("attn_output_gate", True)
    # Qwen3.6 names it; transformers does not read it. Two names of one function.
    values.only("output_gate_type", "swish", "silu")
    has_bias = values.flag("attention_bias", default=False)
    attention = AttentionConfig(
        AttentionHeads.from_json(values),
        [None] * (config.num_layers + has_mtp),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_head_norms=True,
        has_gate=True,
    )
    model = load_hybrid_model(
        *(shard, values, config),
        attention=attention,
        read=read,
        load_feed_forward=lambda layer: load_feed_forward(layer, f"{layer_name(layer)}.mlp"),
    )

    def load_block(name: str) -> DecoderLayer:
        layer, mlp = config.num_layers, load_feed_forward(None, f"{name}.mlp")
        attends = load_attention(shard, config, layer, attention, prefix=name)
        return DecoderLayer.load(shard, config, layer, attention=attends, mlp=mlp, prefix=name)

    if has_mtp:
        model.mtp = load_own_mtp(shard, config, model, load_block)
    return model


def load_gated_sparse_mlp(
    shard: Shard,
    values: ConfigValues,
    config: DecoderConfig,
    prefix: str,
    *,
    renormalizes: bool = True,
    has_stacks: bool = False,
) -> FeedForward:
    """Load experts, and `{prefix}.shared_expert`, whose result the sigmoid of `.shared_expert_gate` multiplies."""
    rule = RoutingRule(values.size("num_experts_per_tok"), RouterScore.SOFTMAX, renormalizes=renormalizes)
    num_experts, expert_size = values.size("num_experts"), values.size("moe_intermediate_size")
    sparse = SparseConfig(num_experts, expert_size, rule, has_stacks=has_stacks)
    inner_size = values.size("shared_expert_intermediate_size")
    shared = load_mlp(shard, config, f"{prefix}.shared_expert", inner_size=inner_size)
    weight = shard.weights.dense(f"{prefix}.shared_expert_gate", (1, config.hidden_size))
    gate, ops = Linear(shard.ops, weight, shard.weights.dtype), shard.ops

    def share(x: Tensor) -> Tensor:
        return ops.mul_sigmoid(shared(x), gate(x))

    return load_sparse_mlp(shard, config, prefix, sparse=sparse, shared=share)
