"""DeepSeek-V3.2: DeepSeek-V3 with an indexer that selects what tokens attend to; see `layers.indexer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.deepseek_v3 import load_like_deepseek_v3
from services.worker.models.parts.decoder import DecoderModel
from services.worker.models.parts.latent_attention import IndexerConfig
from shared.model_files.model_dir import ModelDirectoryError

# The defaults of transformers' configuration.
_NUM_HEADS = 64
_HEAD_DIM = 128
_NUM_SELECTED = 2048
# The second name is the older one.
_LAYER_TYPES = {"indexed_attention", "deepseek_sparse_attention"}


def load_deepseek_v32(config: Mapping[str, Any], shard: Shard, *, with_mtp: bool = False) -> DecoderModel:
    """Load a rank's part of the model. See `load_deepseek_v3`."""
    values = ConfigValues(config)
    # transformers does not read it: another value would be another model.
    values.only("indexer_rope_interleave", False)
    return load_like_deepseek_v3(values, shard, with_mtp=with_mtp, indexer=read_indexer(values))


def read_indexer(values: ConfigValues) -> IndexerConfig:
    """The sizes of the indexer that every layer has.

    Raises:
        ModelDirectoryError: also if a layer's attention is of another type.
    """
    kinds = values.texts("layer_types", values.size("num_hidden_layers")) or ()
    if unknown := set(kinds) - _LAYER_TYPES:
        raise ModelDirectoryError(f"config.json: layer_types {sorted(unknown)} are not supported: every layer selects")
    return IndexerConfig(
        num_heads=values.size("index_n_heads", default=_NUM_HEADS),
        head_dim=values.size("index_head_dim", default=_HEAD_DIM),
        num_selected=values.size("index_topk", default=_NUM_SELECTED),
    )
