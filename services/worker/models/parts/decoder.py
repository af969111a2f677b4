"""The decoder that every family builds on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.forward.forward_context import get_forward_context
from services.worker.forward.kv_cache import KvCacheSpec, LayerCache
from services.worker.forward.state_cache import NO_STATES, StateSpec
from services.worker.layers.activation import GatedMlp
from services.worker.layers.context_limit import ContextLimit
from services.worker.layers.embedding import Embedding, Head
from services.worker.layers.linear import Linear, sum_over_ranks
from services.worker.layers.norm import RmsNorm
from services.worker.layers.rotary import RopeConfig, Rotary
from services.worker.layers.shard import Part, Shard
from services.worker.models.config import ConfigValues
from services.worker.models.protocol import CausalLM, MtpLayers
from services.worker.ops import Activation, EmbeddingKernel, LinearKernel, RopeRows
from shared.model_files.model_dir import ModelDirectoryError

logger = logging.getLogger(__name__)

# Bounds the work for a malformed configuration before the first weight turns out to be missing.
_MAX_LAYERS = 10_000

_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
# transformers' names of the same function; see its ACT2FN.
_SILU = ("silu", "swish")
_PLAIN_ROPE: Mapping[str, Any] = {}

# Maps [T, hidden] and the step's rotations to a new [T, hidden]; writes the cache.
SelfAttention = Callable[[Tensor, RopeRows], Tensor]
# Maps [T, hidden] to a new [T, hidden].
FeedForward = Callable[[Tensor], Tensor]
# Reads what a norm multiplies by, [size], from the tensor `{name}.weight` that a checkpoint stores.
ReadNorm = Callable[[Shard, str, int], Tensor]


def read_norm(shard: Shard, name: str, size: int) -> Tensor:
    """Read a weight that is stored as it is, in the model's dtype."""
    return shard.weights.read(f"{name}.weight", (size,))


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What all families have: values of config.json, and a way of storing norms."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    """The context served: the most tokens in a sequence."""
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    read_norm: ReadNorm = read_norm

    @classmethod
    def from_json(
        cls,
        values: ConfigValues,
        context: ContextLimit,
        *,
        default_theta: float = 10000.0,
        default_partial_factor: float | None = None,
        default_rope: Mapping[str, Any] = _PLAIN_ROPE,
    ) -> DecoderConfig:
        """Read the common values; the defaults are the family's.

        Args:
            context: `Shard.context`.
            default_partial_factor: None means that the family rotates whole heads, and refuses anything else.
            default_rope: The scaling for a configuration that says nothing about it.
        """
        values.choice("hidden_act", _SILU, default="silu")
        # What differs between layers, in transformers' heterogeneous models.
        values.only("per_layer_config", {})
        values.only("is_encoder_decoder", False)
        max_positions = values.size("max_position_embeddings")
        rope = RopeConfig.from_json(
            values.json,
            default_theta=default_theta,
            default_partial_factor=default_partial_factor or 1.0,
            default_parameters=default_rope,
        )
        if default_partial_factor is None and rope.partial_rotary_factor != 1:
            # transformers ignores it in these families, other programs do not: what the publisher meant is unknown.
            raise ModelDirectoryError(
                f"config.json: partial_rotary_factor is {rope.partial_rotary_factor}, but this architecture rotates "
                "whole heads"
            )
        return cls(
            vocab_size=values.size("vocab_size"),
            hidden_size=values.size("hidden_size"),
            num_layers=read_num_layers(values),
            context_length=context.context_of(rope.context_length(max_positions)),
            rms_norm_eps=values.number("rms_norm_eps"),
            rope=rope,
            tie_embeddings=values.flag("tie_word_embeddings", default=False),
        )


def read_num_layers(values: ConfigValues) -> int:
    """The number of the model's own layers."""
    return values.size("num_hidden_layers", highest=_MAX_LAYERS)


def layer_name(layer: int) -> str:
    """How the names of a layer's tensors begin."""
    return f"model.layers.{layer}"


class DecoderLayer:
    """Pre-norm attention and feed-forward network on a residual stream."""

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
        shard: Shard,
        config: DecoderConfig,
        layer: int,
        *,
        attention: SelfAttention,
        mlp: FeedForward,
        prefix: str | None = None,
    ) -> DecoderLayer:
        """Load the norms around `attention` and `mlp`; `prefix` is the layer's name if not `layer_name(layer)`."""
        prefix = prefix or layer_name(layer)
        return cls(
            attention_norm=load_norm(shard, config, f"{prefix}.input_layernorm"),
            attention=attention,
            mlp_norm=load_norm(shard, config, f"{prefix}.post_attention_layernorm"),
            mlp=mlp,
        )

    def __call__(self, hidden: Tensor | None, residual: Tensor, rope: RopeRows) -> Tensor:
        """Run the layer; its result is not yet added to `residual`, as the next norm fuses the addition.

        Args:
            hidden: [T, hidden], the previous layer's result; None for the first layer. Its contents are lost.
            residual: [T, hidden]; written in place.
        """
        normed = self._attention_norm(residual) if hidden is None else self._attention_norm.add(hidden, residual)
        attended = self._attention(normed, rope)
        return self._mlp(self._mlp_norm.add(attended, residual))


class DecoderModel(CausalLM):
    """A model made of `DecoderLayer`s. See `CausalLM`."""

    implementation = "lockstep"
    code = ""
    mtp: MtpLayers | None = None
    """Set by a family that includes such layers in `kv_layers`."""

    _head: Callable[[Tensor], Tensor]

    def __init__(
        self,
        shard: Shard,
        config: DecoderConfig,
        *,
        layers: Sequence[DecoderLayer],
        rotaries: Sequence[Rotary],
        kv_layers: Sequence[LayerCache],
        states: StateSpec = NO_STATES,
    ) -> None:
        """Load embedding, final norm and head, if the shard has one, around the layers.

        Args:
            rotaries: Each layer's rotation; `mtp`'s layers have the last one.
            kv_layers: What a token keeps in the cache, by layer, `mtp`'s last.
            states: What a sequence keeps beside that.

        Raises:
            ModelDirectoryError: see `ModelWeights`, or the vocabulary cannot be split over the ranks.
        """
        self.dtype = shard.weights.dtype
        self.context_length = config.context_length
        self.logits_width = config.vocab_size
        self.kv_cache_spec = KvCacheSpec(tuple(kv_layers))
        self.state_spec = states
        parts = shard.parts("vocab_size", config.vocab_size)
        part = parts[shard.tp.rank]
        shape = config.vocab_size, config.hidden_size
        if shard.has_head:
            embedding, head = load_ends(shard, shape, part, is_tied=config.tie_embeddings)
            self._head = Head(head, parts, shard.tp)
        else:
            embedding = load_embedding(shard, shape, part)
            self._head = _sums
        self.embedding = Embedding(embedding, part, shard.tp)
        self.rotary = rotaries[-1]
        self.has_long_factors = any(rotary.has_long_factors for rotary in rotaries)
        self._rotaries = list(dict.fromkeys(rotaries))
        places = [self._rotaries.index(rotary) for rotary in rotaries]
        self._layers = list(zip(layers, places, strict=True))
        self._norm = load_norm(shard, config, "model.norm")

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to a new [T, hidden], the residual stream that enters the first layer."""
        return self.embedding(token_ids)

    @override
    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        ropes = [rotary.select(positions) for rotary in self._rotaries]
        residual = self.embed(token_ids)
        hidden: Tensor | None = None
        progress = get_forward_context().progress
        for layer, place in self._layers:
            hidden = layer(hidden, residual, ropes[place])
            progress.num_layers += 1
        assert hidden is not None
        return self._norm.add(hidden, residual)

    @override
    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden).float()


def load_embedding(shard: Shard, shape: tuple[int, int], part: Part, name: str = _EMBEDDING) -> EmbeddingKernel:
    """This rank's part of the embedding alone; see `load_ends`."""
    weights = shard.weights
    return shard.ops.prepare_embedding(weights.embedding(name, shape, rows=part.run), weights.dtype)


def _sums(hidden: Tensor) -> Tensor:
    """Logits [T, 1] in the place of a head's: only token 0 can be drawn, and they are finite where `hidden` is."""
    return hidden.float().sum(1, keepdim=True)


def load_ends(
    shard: Shard,
    shape: tuple[int, int],
    part: Part,
    *,
    is_tied: bool,
    names: tuple[str, str] = (_EMBEDDING, _HEAD),
) -> tuple[EmbeddingKernel, LinearKernel]:
    """This rank's part of the embedding and of the head.

    Args:
        shard: The rank's part of the model.
        shape: Vocabulary and hidden size.
        part: Of the vocabulary.
        is_tied: Whether config.json says that both are one matrix.
        names: Of the embedding and of the head, without `.weight`.

    Source: transformers 5, `PreTrainedModel.tie_weights`, which ties what config.json says unless both are stored with
    different values, and to the one that is stored.
    """
    weights = shard.weights
    first, last = names
    if is_tied and weights.differ(f"{last}.weight", f"{first}.weight"):
        is_tied = False
        logger.warning(
            "config.json: tie_word_embeddings is true, but the stored head differs from the embeddings and is used",
            extra={"tensor": f"{last}.weight"},
        )
    if is_tied:
        has_only_head = f"{last}.weight" in weights and f"{first}.weight" not in weights
        tied = weights.head(last if has_only_head else first, shape, rows=part.run)
        return shard.ops.prepare_tied(tied, weights.dtype)
    embedding = load_embedding(shard, shape, part, first)
    return embedding, shard.ops.prepare_head(weights.head(last, shape, rows=part.run), weights.dtype)


def load_norm(shard: Shard, config: DecoderConfig, name: str) -> RmsNorm:
    """Load a norm over the hidden size."""
    return RmsNorm(shard.ops, config.read_norm(shard, name, config.hidden_size), config.rms_norm_eps)


def load_mlp(
    shard: Shard,
    config: DecoderConfig,
    prefix: str,
    *,
    inner_size: int,
    has_bias: bool = False,
    activation: Activation = Activation.SILU,
) -> FeedForward:
    """Load `{prefix}.gate_proj`, `.up_proj` and `.down_proj`, split over the ranks."""
    hidden, inner = Part.whole(config.hidden_size), shard.part("intermediate_size", inner_size)
    names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
    gate_up = Linear.load(shard, names, [inner, inner], inputs=hidden, has_bias=has_bias)
    down = Linear.load(shard, [f"{prefix}.down_proj"], [hidden], inputs=inner, has_bias=has_bias)
    return sum_over_ranks(GatedMlp(shard.ops, gate_up, down, activation), shard.tp)
