"""Qwen3.5 and 3.6, of which the text is served: the layers of Qwen3-Next, dense or with experts.

A token of text has one position for time, height and width, so that a rotation by sections is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderModel, FeedForward, load_mlp
from services.worker.models.parts.recurrent import read_plain
from services.worker.models.qwen3_next import load_gated_model, load_gated_sparse_mlp, read_common

# The defaults of transformers' configurations.
_COMMON: Mapping[str, Any] = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DENSE: Mapping[str, Any] = {
    **_COMMON,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
_SPARSE: Mapping[str, Any] = {
    **_COMMON,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}


def load_qwen3_5(config: Mapping[str, Any], shard: Shard, *, with_mtp: bool = False) -> DecoderModel:
    """Load a rank's part of the dense model; raises as `ModelLoader` says. `with_mtp` adds the layer that drafts."""
    values = ConfigValues(config, _DENSE)
    common = read_common(values, shard.context)

    def load_feed_forward(_: int | None, prefix: str) -> FeedForward:
        return load_mlp(shard, common, prefix, inner_size=values.size("intermediate_size"))

    return load_gated_model(
        shard, values, common, read=read_plain, load_feed_forward=load_feed_forward, with_mtp=with_mtp
    )


def load_qwen3_5_moe(config: Mapping[str, Any], shard: Shard, *, with_mtp: bool = False) -> DecoderModel:
    """Load a rank's part of the model with experts in every layer; otherwise as `load_qwen3_5`."""
    values = ConfigValues(config, _SPARSE)
    common = read_common(values, shard.context)
    values.only("norm_topk_prob", True)

    def load_feed_forward(_: int | None, prefix: str) -> FeedForward:
        return load_gated_sparse_mlp(shard, values, common, prefix, has_stacks=True)

    return load_gated_model(
        shard, values, common, read=read_plain, load_feed_forward=load_feed_forward, with_mtp=with_mtp
    )
