"""Llama (arXiv:2302.13971, 2407.21783) and what shares its architecture: SmolLM2, TinyLlama, Llama 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from services.worker.kv_cache import KvCacheSpec
from services.worker.layers.activation import GatedMlp
from services.worker.layers.attention import Attention
from services.worker.layers.embedding import Embedding
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RmsNorm
from services.worker.layers.rotary import RopeConfig, Rotary
from services.worker.ops import Ops, RopeRows
from services.worker.weights import ModelWeights
from shared.model_dir import ModelDirectoryError

# Tensors that checkpoints carry and nobody needs: old ones store the rotary frequencies, tied ones the head again.
_IGNORED = ("rotary_emb.inv_freq",)
_LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """What of config.json decides on the computation."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LlamaConfig:
        """Read and check config.json.

        Raises:
            ModelDirectoryError: a field is missing, malformed or asks for what is not supported.
        """
        try:
            config = cls._read(values)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelDirectoryError(f"config.json: {error!r}") from error
        sizes = [size for size in astuple(config) if type(size) is int]
        if min(sizes) < 1 or config.head_dim % 2:
            raise ModelDirectoryError("config.json: every size must be at least 1, and head_dim even")
        if config.num_heads % config.num_kv_heads:
            raise ModelDirectoryError("config.json: num_attention_heads is no multiple of num_key_value_heads")
        if values.get("hidden_act", "silu") != "silu":
            raise ModelDirectoryError(f"config.json: hidden_act {values['hidden_act']!r} is not supported")
        return config

    @classmethod
    def _read(cls, values: Mapping[str, Any]) -> LlamaConfig:
        hidden_size, num_heads = int(values["hidden_size"]), int(values["num_attention_heads"])
        return cls(
            vocab_size=int(values["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(values["intermediate_size"]),
            num_layers=int(values["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(values.get("num_key_value_heads") or num_heads),
            head_dim=int(values.get("head_dim") or hidden_size // num_heads),
            max_positions=int(values["max_position_embeddings"]),
            rms_norm_eps=float(values["rms_norm_eps"]),
            rope=RopeConfig.from_json(values),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            attention_bias=bool(values.get("attention_bias", False)),
            mlp_bias=bool(values.get("mlp_bias", False)),
        )


class LlamaDecoderLayer:
    """Attention and feed-forward network, each behind a norm and beside the residual stream."""

    def __init__(self, ops: Ops, config: LlamaConfig, weights: ModelWeights, layer: int) -> None:
        """Load layer number `layer`.

        Raises:
            ModelDirectoryError: a tensor is missing or of another shape.
        """
        prefix = f"model.layers.{layer}"
        self._attention_norm = _norm(ops, config, weights, f"{prefix}.input_layernorm")
        self._attention = _attention(ops, config, weights, layer)
        self._mlp_norm = _norm(ops, config, weights, f"{prefix}.post_attention_layernorm")
        self._mlp = _mlp(ops, config, weights, f"{prefix}.mlp")

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


class LlamaForCausalLM:
    """The model. See `CausalLM`."""

    def __init__(self, ops: Ops, config: LlamaConfig, weights: ModelWeights) -> None:
        """Load all weights.

        Raises:
            ModelDirectoryError: a tensor is missing, of another shape, or has no place here.
        """
        self.context_length = config.max_positions
        self.logits_width = config.vocab_size
        self.kv_cache_spec = KvCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, weights.dtype)
        embedding = weights.read("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._embedding = Embedding(ops, embedding)
        self._rotary = Rotary(ops, config.rope, config.head_dim, config.max_positions)
        self._layers = [LlamaDecoderLayer(ops, config, weights, layer) for layer in range(config.num_layers)]
        self._norm = _norm(ops, config, weights, "model.norm")
        head = embedding if config.tie_embeddings else weights.read(_LM_HEAD, tuple(embedding.shape))
        self._head = Linear(ops, head)
        weights.check_all_read(ignored_suffixes=(*_IGNORED, _LM_HEAD) if config.tie_embeddings else _IGNORED)

    @classmethod
    def load(cls, config: Mapping[str, Any], weights: ModelWeights, ops: Ops) -> LlamaForCausalLM:
        """Build the model that `config` (config.json) describes.

        Raises:
            ModelDirectoryError: configuration and weights do not make a model.
        """
        return cls(ops, LlamaConfig.from_json(config), weights)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        rope = self._rotary.select(positions)
        residual = self._embedding(token_ids)
        hidden: Tensor | None = None
        for layer in self._layers:
            hidden = layer(hidden, residual, rope)
        assert hidden is not None
        return self._norm.add(hidden, residual)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.compute_logits`."""
        return self._head(hidden).float()


def _norm(ops: Ops, config: LlamaConfig, weights: ModelWeights, name: str) -> RmsNorm:
    return RmsNorm(ops, weights.read(f"{name}.weight", (config.hidden_size,)), config.rms_norm_eps)


def _attention(ops: Ops, config: LlamaConfig, weights: ModelWeights, layer: int) -> Attention:
    prefix = f"model.layers.{layer}.self_attn"
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = Linear.load(
        ops,
        weights,
        [f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"],
        [query_size, kv_size, kv_size],
        in_features=config.hidden_size,
        has_bias=config.attention_bias,
    )
    output = Linear.load(
        ops,
        weights,
        [f"{prefix}.o_proj"],
        [config.hidden_size],
        in_features=query_size,
        has_bias=config.attention_bias,
    )
    return Attention(ops, layer, qkv=qkv, output=output, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)


def _mlp(ops: Ops, config: LlamaConfig, weights: ModelWeights, prefix: str) -> GatedMlp:
    gate_up = Linear.load(
        ops,
        weights,
        [f"{prefix}.gate_proj", f"{prefix}.up_proj"],
        [config.intermediate_size] * 2,
        in_features=config.hidden_size,
        has_bias=config.mlp_bias,
    )
    down = Linear.load(
        ops,
        weights,
        [f"{prefix}.down_proj"],
        [config.hidden_size],
        in_features=config.intermediate_size,
        has_bias=config.mlp_bias,
    )
    return GatedMlp(ops, gate_up, down)
