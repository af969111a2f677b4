"""DeepSeek-V3 and R1 (arXiv:2412.19437): latent attention, grouped experts routed with a correction bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.deepseek import load_deepseek, read_dense_layers
from services.worker.models.parts.decoder import DecoderConfig, DecoderModel
from services.worker.models.parts.latent_attention import IndexerConfig, LatentAttentionConfig
from services.worker.models.parts.mtp import mtp_layers_to_load
from services.worker.models.parts.sparse_mlp import FeedForwardConfig, SparseConfig

# The default of transformers' configuration.
_NUM_DENSE_LAYERS = 3


def load_deepseek_v3(config: Mapping[str, Any], shard: Shard, *, with_mtp: bool = False) -> DecoderModel:
    """Load a rank's part of the model; raises as `ModelLoader` says. `with_mtp` adds the layers that draft."""
    values = ConfigValues(config)
    # transformers rotates by it, and fails where it is not this.
    values.only("head_dim", values.size("qk_rope_head_dim"))
    return load_like_deepseek_v3(values, shard, with_mtp=with_mtp)


def load_like_deepseek_v3(
    values: ConfigValues,
    shard: Shard,
    *,
    with_mtp: bool,
    indexer: IndexerConfig | None = None,
) -> DecoderModel:
    """Load a rank's part of a model with DeepSeek-V3's layers.

    Args:
        values: config.json, with the family's defaults.
        shard: The rank's part.
        with_mtp: Load the layers that draft, too.
        indexer: Selects the tokens that are attended to; without it, attention is dense.
    """
    # transformers does not read them: other values would be other models.
    values.only("moe_layer_freq", 1)
    values.only("qk_head_dim", values.size("qk_nope_head_dim") + values.size("qk_rope_head_dim"))
    common = DecoderConfig.from_json(values, shard.context)
    dense_layers = read_dense_layers(values, common.num_layers, default_count=_NUM_DENSE_LAYERS)
    feed_forward = FeedForwardConfig.from_json(values, dense_layers, SparseConfig.corrected_sigmoid(values))
    return load_deepseek(
        shard,
        common,
        attention=LatentAttentionConfig.from_json(values, common, has_rope_choice=indexer is None, indexer=indexer),
        feed_forward=feed_forward,
        mtp_layers=mtp_layers_to_load(values, common, shard.weights, with_mtp=with_mtp),
    )
