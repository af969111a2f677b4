"""What DeepSeek's models share: latent attention in every layer, dense networks in a few, experts in the others."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.models.config import ConfigValues
from services.worker.models.decoder import DecoderConfig, DecoderLayer, DecoderModel, FeedForward, load_mlp
from services.worker.models.latent_attention import LatentAttentionConfig, load_latent_attention, load_latent_rotary
from services.worker.models.mtp import load_mtp
from services.worker.models.sparse_mlp import SparseConfig, load_sparse_mlp
from services.worker.ops import Ops
from services.worker.weights import ModelWeights
from shared.model_dir import ModelDirectoryError

_MLP_TYPES = ("dense", "sparse")


@dataclass(frozen=True, slots=True)
class FeedForwardConfig:
    """The feed-forward networks of a model."""

    dense_size: int
    has_dense_bias: bool
    # All other layers have experts, those for multi-token prediction too.
    dense_layers: frozenset[int]
    sparse: SparseConfig

    def load(self, ops: Ops, config: DecoderConfig, weights: ModelWeights, layer: int) -> FeedForward:
        """That of layer number `layer` of a checkpoint."""
        prefix = f"model.layers.{layer}.mlp"
        if layer not in self.dense_layers:
            return load_sparse_mlp(ops, config, weights, prefix, sparse=self.sparse)
        return load_mlp(ops, config, weights, prefix, inner_size=self.dense_size, has_bias=self.has_dense_bias)


def read_dense_layers(values: ConfigValues, num_layers: int, *, default_count: int) -> frozenset[int]:
    """The layers without experts: the first ones, or as `mlp_layer_types` says.

    Args:
        values: config.json.
        num_layers: Of the model.
        default_count: How many of the first ones where config.json does not say.

    Raises:
        ModelDirectoryError: a value is malformed, or a type is unknown.
    """
    kinds = values.texts("mlp_layer_types", num_layers)
    if kinds is None:
        return frozenset(range(min(values.count("first_k_dense_replace", default=default_count), num_layers)))
    if unknown := set(kinds).difference(_MLP_TYPES):
        raise ModelDirectoryError(f"config.json: mlp_layer_types has {min(unknown)!r}, supported: {_MLP_TYPES}")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")


def load_deepseek(
    ops: Ops,
    config: DecoderConfig,
    weights: ModelWeights,
    *,
    attention: LatentAttentionConfig,
    feed_forward: FeedForwardConfig,
    mtp_layers: range = range(0),
) -> DecoderModel:
    """A model of the kind, and its layers for multi-token prediction.

    Args:
        ops: The backend.
        config: The common values.
        weights: The model's.
        attention: Of every layer.
        feed_forward: Likewise.
        mtp_layers: The numbers of the layers for multi-token prediction.

    Raises:
        ModelDirectoryError: a tensor is missing or of another shape.
    """

    def load_layer(layer: int) -> DecoderLayer:
        return DecoderLayer.load(
            ops,
            config,
            weights,
            layer,
            attention=load_latent_attention(ops, config, weights, layer, attention=attention),
            mlp=feed_forward.load(ops, config, weights, layer),
        )

    layers = [load_layer(layer) for layer in range(config.num_layers)]
    blocks = [load_layer(layer) for layer in mtp_layers]
    kv_layers = [attention.layer_cache(weights.dtype)] * (len(layers) + len(blocks))
    rotary = load_latent_rotary(ops, config, attention)
    model = DecoderModel(ops, config, weights, layers=layers, rotary=rotary, kv_layers=kv_layers)
    model.mtp = load_mtp(ops, config, weights, model, blocks=blocks)
    return model
