"""The decoder that every family builds on: embedding, pre-norm layers on a residual stream, last norm, head.

A family brings its layers: an attention and a feed-forward network for each. `plain_attention` has the attention that
most of them share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.kv_cache import KvCacheSpec, LayerCache
from services.worker.layers.activation import GatedMlp
from services.worker.layers.embedding import Embedding
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RmsNorm
from services.worker.layers.rotary import RopeConfig, Rotary
from services.worker.models.config import ConfigValues
from services.worker.models.protocol import MtpLayers
from services.worker.ops import Ops, RopeRows
from services.worker.weights import ModelWeights

# Bounds the work before the first weight is found missing.
_MAX_LAYERS = 10_000

# [T, hidden] and the step's rotations to a new [T, hidden]; writes the cache.
SelfAttention = Callable[[Tensor, RopeRows], Tensor]
# [T, hidden] to a new [T, hidden].
FeedForward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What all families have in config.json."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    # Tokens of a sequence, at most.
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool

    @classmethod
    def from_json(
        cls, values: ConfigValues, *, default_theta: float = 10000.0, default_partial_factor: float = 1.0
    ) -> DecoderConfig:
        """Read and check the common values.

        Args:
            values: config.json.
            default_theta: The family's base of rotary frequencies where config.json has none.
            default_partial_factor: The share of a head that the family rotates, likewise.

        Raises:
            ModelDirectoryError: one is missing, malformed or asks for what is not supported.
        """
        values.choice("hidden_act", ("silu",), default="silu")
        rope = RopeConfig.from_json(
            values.json, default_theta=default_theta, default_partial_factor=default_partial_factor
        )
        return cls(
            vocab_size=values.size("vocab_size"),
            hidden_size=values.size("hidden_size"),
            num_layers=values.size("num_hidden_layers", highest=_MAX_LAYERS),
            context_length=rope.context_length(values.size("max_position_embeddings")),
            rms_norm_eps=values.number("rms_norm_eps"),
            rope=rope,
            tie_embeddings=values.flag("tie_word_embeddings", default=False),
        )


class DecoderLayer:
    """Attention and feed-forward network, each behind a norm and beside the residual stream."""

    def __init__(
        self, *, attention_norm: RmsNorm, attention: SelfAttention, mlp_norm: RmsNorm, mlp: FeedForward
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    @classmethod
    def load(
        cls,
        ops: Ops,
        config: DecoderConfig,
        weights: ModelWeights,
        layer: int,
        *,
        attention: SelfAttention,
        mlp: FeedForward,
    ) -> DecoderLayer:
        """Layer number `layer` of a checkpoint, around an attention and a feed-forward network."""
        prefix = f"model.layers.{layer}"
        return cls(
            attention_norm=load_norm(ops, config, weights, f"{prefix}.input_layernorm"),
            attention=attention,
            mlp_norm=load_norm(ops, config, weights, f"{prefix}.post_attention_layernorm"),
            mlp=mlp,
        )

    def __call__(self, hidden: Tensor | None, residual: Tensor, rope: RopeRows) -> Tensor:
        """What this layer adds to `residual` last; the addition is left to the next norm, which fuses it.

        Args:
            hidden: [T, hidden], what the layer before left to add; None for the first layer. Its contents are lost.
            residual: [T, hidden], the residual stream; written in place.
            rope: The step's rotations.
        """
        normed = self._attention_norm(residual) if hidden is None else self._attention_norm.add(hidden, residual)
        attended = self._attention(normed, rope)
        return self._mlp(self._mlp_norm.add(attended, residual))


class DecoderModel:
    """A model of such layers. See `CausalLM`."""

    # A family that loads some sets it, and counts their layers in `kv_layers`.
    mtp: MtpLayers | None = None

    def __init__(
        self,
        ops: Ops,
        config: DecoderConfig,
        weights: ModelWeights,
        *,
        layers: Sequence[DecoderLayer],
        rotary: Rotary,
        kv_layers: Sequence[LayerCache],
    ) -> None:
        """Load what is around the layers.

        Args:
            ops: The backend.
            config: The common values.
            weights: Where embedding, last norm and head are read.
            layers: The model's, in order.
            rotary: The rotation that all of them use.
            kv_layers: What a token keeps in the cache, for each layer and then for those of `mtp`.

        Raises:
            ModelDirectoryError: a tensor is missing or of another shape.
        """
        self.dtype = weights.dtype
        self.context_length = config.context_length
        self.logits_width = config.vocab_size
        self.kv_cache_spec = KvCacheSpec(tuple(kv_layers))
        embedding = weights.read("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self.embedding = Embedding(ops, embedding)
        self.head = Linear(ops, embedding) if config.tie_embeddings else load_head(ops, config, weights, "lm_head")
        self.rotary = rotary
        self._layers = list(layers)
        self._norm = load_norm(ops, config, weights, "model.norm")

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        rope = self.rotary.select(positions)
        residual = self.embedding(token_ids)
        hidden: Tensor | None = None
        for layer in self._layers:
            hidden = layer(hidden, residual, rope)
        assert hidden is not None
        return self._norm.add(hidden, residual)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.compute_logits`."""
        return self.head(hidden).float()


def load_norm(ops: Ops, config: DecoderConfig, weights: ModelWeights, name: str) -> RmsNorm:
    """The norm over the hidden size called `name`."""
    return RmsNorm(ops, weights.read(f"{name}.weight", (config.hidden_size,)), config.rms_norm_eps)


def load_head(ops: Ops, config: DecoderConfig, weights: ModelWeights, name: str) -> Linear:
    """The projection onto the vocabulary called `name`."""
    return Linear.load(ops, weights, [name], [config.vocab_size], in_features=config.hidden_size, has_bias=False)


def load_mlp(
    ops: Ops, config: DecoderConfig, weights: ModelWeights, prefix: str, *, inner_size: int, has_bias: bool = False
) -> GatedMlp:
    """The gated network whose projections are `{prefix}.gate_proj`, `.up_proj` and `.down_proj`."""
    names, sizes = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [inner_size] * 2
    gate_up = Linear.load(ops, weights, names, sizes, in_features=config.hidden_size, has_bias=has_bias)
    names, sizes = [f"{prefix}.down_proj"], [config.hidden_size]
    return GatedMlp(ops, gate_up, Linear.load(ops, weights, names, sizes, in_features=inner_size, has_bias=has_bias))
