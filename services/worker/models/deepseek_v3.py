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


def load_deepseek_v3(
    config: Mapping[str, Any],
    shard: Shard,
    *,
    with_mtp: bool = False,
    indexer: IndexerConfig | None = None,
) -> DecoderModel:
    """See `ModelLoader`; `with_mtp` as in `loader_for`. Without `indexer` attention is dense."""
    values = ConfigValues(config)
    if indexer is None:
        # transformers rotates by it, and fails where it is not this.
        values.only("head_dim", values.size("qk_rope_head_dim"))
    common = DecoderConfig.from_json(values)
    dense_layers = read_dense_layers(values, common.num_layers, default_count=_NUM_DENSE_LAYERS)
    feed_forward = FeedForwardConfig.from_json(values, dense_layers, SparseConfig.corrected_sigmoid(values))
    return load_deepseek(
        shard,
        common,
        attention=LatentAttentionConfig.from_json(values, common, has_rope_choice=indexer is None, indexer=indexer),
        feed_forward=feed_forward,
        mtp_layers=mtp_layers_to_load(values, common, shard.weights, with_mtp=with_mtp),
    )
