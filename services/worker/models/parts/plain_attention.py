"""Configuration and loading of grouped-query attention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from services.worker.forward.kv_cache import KvCacheSpec, LayerCache, attention_cache
from services.worker.layers.attention import Attention
from services.worker.layers.linear import Linear, sum_over_ranks
from services.worker.layers.rotary import RopeConfig, Rotary
from services.worker.layers.shard import Part, Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import (
    DecoderConfig,
    DecoderLayer,
    DecoderModel,
    FeedForward,
    SelfAttention,
    layer_name,
)
from services.worker.ops import AttentionParams, HeadNorms
from services.worker.ops.matrix_rows import join_rows, take_rows
from shared.model_files.model_dir import ModelDirectoryError

# What publishers call the scales of an FP8 cache, where {} is k or v. The last name is of both.
# Source: vLLM, `maybe_remap_kv_scale_name` (model_loader/weight_utils.py) and `get_cache_scale` (layers/quantization).
_KV_SCALES = (
    "{}_scale",
    "attn.{}_scale",
    "{}_proj.{}_scale",
    "qkv_proj.{}_scale",
    "qkqkv_proj.{}_scale",
    "{}_proj.output_scale",
    "kv_scale",
)

logger = logging.getLogger(__name__)

FULL, SLIDING = "full_attention", "sliding_attention"
# As in transformers' `remap_legacy_layer_types`.
_OLDER_TYPES = {"attention": FULL}


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """`num_kv_heads` divides `num_heads`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def from_json(cls, values: ConfigValues, *, default_head_dim: int | None = None) -> AttentionHeads:
        """Read the heads; `default_head_dim` None means the hidden size divided by `num_heads`."""
        num_heads = values.size("num_attention_heads")
        num_kv_heads = values.size("num_key_value_heads", default=num_heads)
        hidden_size = values.size("hidden_size")
        head_dim = values.size("head_dim", default=default_head_dim or max(hidden_size // num_heads, 1))
        if num_heads % num_kv_heads:
            raise ModelDirectoryError(
                f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        return cls(num_heads, num_kv_heads, head_dim)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """A family's attention, the same in every layer except for the window."""

    heads: AttentionHeads
    windows: Sequence[int | None]
    """How many tokens each layer's tokens see, including themselves; None means all up to themselves."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_head_norms: bool = False
    has_sinks: bool = False
    scale: float | None = None
    """Multiplies the products of queries and keys; None means `head_dim ** -0.5`."""
    query_scales: Tensor | None = None
    """See `Attention`."""
    has_gate: bool = False
    """Whether `q_proj` gives each head's query, and then the gate of what it attends to."""
    ropes: Sequence[RopeConfig] | None = None
    """Each layer's rotation; None means that all have the model's."""

    def kv_layers(self, shard: Shard, context_length: int) -> list[LayerCache]:
        """What a token keeps in this rank's cache, by layer; logs what windows leave unread of a whole context."""
        num_heads = len(shard.kv_heads(self.heads.num_kv_heads))
        layer = attention_cache(num_heads, self.heads.head_dim, shard.kv_dtype)
        _log_unread(self.windows, KvCacheSpec((layer,)).bytes_per_token, context_length)
        return [layer] * len(self.windows)


def _log_unread(windows: Sequence[int | None], layer_bytes: int, context_length: int) -> None:
    """Log the cost of windows if there are any: no token leaves the cache before its sequence."""
    narrow = [window for window in windows if window is not None and window < context_length]
    if not narrow:
        return
    logger.info(
        "layers with a window keep the keys and values of the whole context, beyond what they read",
        extra={
            "layers": len(narrow),
            "window": max(narrow),
            "context_length": context_length,
            "bytes_per_token": len(narrow) * layer_bytes,
            "bytes_per_context": len(narrow) * layer_bytes * context_length,
            "bytes_read": sum(narrow) * layer_bytes,
        },
    )


def windows_by_type(values: ConfigValues, window: int | None, default: Sequence[str]) -> list[int | None]:
    """Each layer's window: `window` for layers of type `SLIDING`; `default` is used where `layer_types` is absent."""
    types = [_OLDER_TYPES.get(kind, kind) for kind in values.texts("layer_types", len(default)) or default]
    if unknown := set(types) - {FULL, SLIDING}:
        raise ModelDirectoryError(f"config.json: layer_types {sorted(unknown)} are not supported")
    if window is None and SLIDING in types:
        raise ModelDirectoryError("config.json: layer_types has sliding windows, but no window is configured")
    return [window if kind == SLIDING else None for kind in types]


class MakeLayer(Protocol):
    """Makes a layer of its two parts, as `DecoderLayer.load` does.

    A part may be wrapped in any function of its arguments: what it adds to the residual stream can be normalised or
    multiplied.
    """

    def __call__(
        self, shard: Shard, config: DecoderConfig, layer: int, *, attention: SelfAttention, mlp: FeedForward
    ) -> DecoderLayer:
        """Load the norms of layer `layer` around `attention` and `mlp`."""


def load_plain_model(
    shard: Shard,
    config: DecoderConfig,
    *,
    attention: AttentionConfig,
    load_feed_forward: Callable[[int], FeedForward],
    make_layer: MakeLayer = DecoderLayer.load,
    model: Callable[..., DecoderModel] = DecoderModel,
) -> DecoderModel:
    """Load a model with this attention.

    Args:
        shard: The rank's part.
        config: What families have in common.
        attention: That of all layers.
        load_feed_forward: Gets a layer's number.
        make_layer: Loads the norms around both parts of a layer, which it may wrap; see `MakeLayer`.
        model: Takes the arguments of `DecoderModel`, such as a subclass with embeddings or logits of its own.
    """
    layers = [
        make_layer(
            shard,
            config,
            layer,
            attention=load_attention(shard, config, layer, attention),
            mlp=load_feed_forward(layer),
        )
        for layer in range(config.num_layers)
    ]
    kv_layers = attention.kv_layers(shard, config.context_length)
    return model(shard, config, layers=layers, rotaries=_load_rotaries(shard, config, attention), kv_layers=kv_layers)


def load_plain_layer(
    shard: Shard,
    config: DecoderConfig,
    layer: int,
    *,
    attention: AttentionConfig,
    feed_forward: FeedForward,
) -> DecoderLayer:
    """Load layer `layer` of a checkpoint."""
    attends = load_attention(shard, config, layer, attention)
    return DecoderLayer.load(shard, config, layer, attention=attends, mlp=feed_forward)


def _load_rotaries(shard: Shard, config: DecoderConfig, attention: AttentionConfig) -> list[Rotary]:
    """Each layer's rotation, loaded once for layers with the same."""
    ropes = attention.ropes or [config.rope] * config.num_layers
    loaded = {rope: load_rotary(shard, replace(config, rope=rope), attention.heads) for rope in dict.fromkeys(ropes)}
    return [loaded[rope] for rope in ropes]


def load_rotary(shard: Shard, config: DecoderConfig, heads: AttentionHeads) -> Rotary:
    """The rotation of the heads.

    Raises:
        ModelDirectoryError: see `RopeConfig.rotary_dim`.
    """
    rotary_dim = config.rope.rotary_dim(heads.head_dim)
    return Rotary(shard.ops, config.rope, rotary_dim, config.context_length, device=shard.weights.device)


def load_attention(
    shard: Shard, config: DecoderConfig, layer: int, attention: AttentionConfig, *, prefix: str | None = None
) -> Attention:
    """This rank's heads; the output projection is summed over the ranks.

    Args:
        layer: The layer's number, in the KV cache too.
        prefix: The layer's name if it is not `layer_name(layer)`.
    """
    ops, weights, head_dim = shard.ops, shard.weights, attention.heads.head_dim
    prefix = f"{prefix or layer_name(layer)}.self_attn"
    heads, kv_heads = shard.heads(attention.heads.num_heads), shard.kv_heads(attention.heads.num_kv_heads)
    hidden, query, kv = Part.whole(config.hidden_size), heads.times(head_dim), kv_heads.times(head_dim)
    sinks = None
    if attention.has_sinks:
        sinks = weights.read(f"{prefix}.sinks", (heads.total,), rows=heads.run, dtype=torch.float32)
    scale = head_dim**-0.5 if attention.scale is None else attention.scale
    params = AttentionParams(scale, attention.windows[layer], sinks)
    gate = None
    if attention.has_gate:
        qkv, gate = _load_gated(shard, config, prefix, heads=heads, kv=kv, attention=attention)
    else:
        names = [f"{prefix}.{name}_proj" for name in "qkv"]
        qkv = Linear.load(shard, names, [query, kv, kv], inputs=hidden, has_bias=attention.has_qkv_bias)
    output = Linear.load(shard, [f"{prefix}.o_proj"], [hidden], inputs=query, has_bias=attention.has_output_bias)
    norms = None
    if attention.has_head_norms:
        query_norm, key_norm = (config.read_norm(shard, f"{prefix}.{letter}_norm", head_dim) for letter in "qk")
        norms = HeadNorms(query_norm, key_norm, config.rms_norm_eps)
    return Attention(
        ops,
        layer,
        qkv=qkv,
        output=sum_over_ranks(output, shard.tp),
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        params=params,
        norms=norms,
        kv_scales=_load_kv_scales(shard, prefix),
        query_scales=attention.query_scales,
        gate=gate,
    )


def _load_gated(
    shard: Shard, config: DecoderConfig, prefix: str, *, heads: Part, kv: Part, attention: AttentionConfig
) -> tuple[Linear, Linear]:
    """The fused projections of query, key and value, and that of the gates, whose rows lie between the queries'."""
    weights, dtype, head_dim = shard.weights, shard.weights.dtype, attention.heads.head_dim
    both = heads.times(2 * head_dim)
    of_query, of_gate = (
        rows.flatten().to(weights.device) for rows in torch.arange(len(both)).view(-1, 2, head_dim).unbind(1)
    )
    mixed = weights.linear(f"{prefix}.q_proj", (both.total, config.hidden_size), rows=both.run)
    kv_shape = kv.total, config.hidden_size
    key, value = (weights.linear(f"{prefix}.{letter}_proj", kv_shape, rows=kv.run) for letter in "kv")
    fused, gate = join_rows([take_rows(mixed, of_query), key, value], dtype), take_rows(mixed, of_gate)
    if not attention.has_qkv_bias:
        return Linear(shard.ops, fused, dtype), Linear(shard.ops, gate, dtype)
    bias = weights.read(f"{prefix}.q_proj.bias", (both.total,), rows=both.run)
    others = [weights.read(f"{prefix}.{letter}_proj.bias", (kv.total,), rows=kv.run) for letter in "kv"]
    fused_bias = torch.cat([bias[of_query], *others])
    return Linear(shard.ops, fused, dtype, fused_bias), Linear(shard.ops, gate, dtype, bias[of_gate])


def _load_kv_scales(shard: Shard, prefix: str) -> tuple[Tensor, ...]:
    """The scales of cached keys and values; none unless the cache is in float8_e4m3fn."""
    if shard.kv_dtype != torch.float8_e4m3fn:
        return ()
    return tuple(
        shard.weights.scale([f"{prefix}.{name.replace('{}', letter)}" for name in _KV_SCALES]) for letter in "kv"
    )
