"""What DeepSeek's models share: latent attention in every layer, experts in all but a few."""

from __future__ import annotations

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderConfig, DecoderLayer, DecoderModel
from services.worker.models.parts.latent_attention import (
    LatentAttentionConfig,
    load_latent_attention,
    load_latent_rotary,
)
from services.worker.models.parts.mtp import load_mtp
from services.worker.models.parts.sparse_mlp import FeedForwardConfig
from shared.model_files.model_dir import ModelDirectoryError

_MLP_TYPES = ("dense", "sparse")


def read_dense_layers(values: ConfigValues, num_layers: int, *, default_count: int) -> frozenset[int]:
    """The layers without experts: by `mlp_layer_types`, or else the first `first_k_dense_replace` (`default_count`)."""
    kinds = values.texts("mlp_layer_types", num_layers)
    if kinds is None:
        return frozenset(range(min(values.count("first_k_dense_replace", default=default_count), num_layers)))
    if unknown := set(kinds).difference(_MLP_TYPES):
        raise ModelDirectoryError(f"config.json: mlp_layer_types has {min(unknown)!r}; supported: {_MLP_TYPES}")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")


def load_deepseek(
    shard: Shard,
    config: DecoderConfig,
    *,
    attention: LatentAttentionConfig,
    feed_forward: FeedForwardConfig,
    mtp_layers: range = range(0),
) -> DecoderModel:
    """Load a DeepSeek model, with `mtp_layers`.

    Raises:
        ModelDirectoryError: see `DecoderModel`, or the cache is to have another type than the model.
    """
    if shard.kv_dtype != shard.weights.dtype:
        raise ModelDirectoryError("--kv-cache-dtype: latents are stored in the model's type only")

    def load_layer(layer: int) -> DecoderLayer:
        return DecoderLayer.load(
            shard,
            config,
            layer,
            attention=load_latent_attention(shard, config, layer, attention=attention),
            mlp=feed_forward.load(shard, config, layer),
        )

    layers = [load_layer(layer) for layer in range(config.num_layers)]
    blocks = [load_layer(layer) for layer in mtp_layers]
    kv_layers = [attention.layer_cache(layer, shard.weights.dtype) for layer in range(len(layers) + len(blocks))]
    rotary = load_latent_rotary(shard, config, attention)
    model = DecoderModel(shard, config, layers=layers, rotaries=[rotary] * len(layers), kv_layers=kv_layers)
    indexer = attention.indexer
    num_shared = indexer.num_selected if indexer is not None and indexer.is_shared_by_drafts else 0
    model.mtp = load_mtp(shard, config, model, blocks=blocks, num_shared_positions=num_shared)
    return model
