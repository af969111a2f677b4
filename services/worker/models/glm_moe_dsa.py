"""GLM-5, 5.1 and 5.2 (arXiv:2603.12201): DeepSeek-V3.2, with indexers that several layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.deepseek_v3 import load_like_deepseek_v3
from services.worker.models.deepseek_v32 import read_indexer
from services.worker.models.parts.decoder import DecoderModel, read_num_layers
from services.worker.models.parts.latent_attention import IndexerConfig
from services.worker.models.parts.mtp import num_mtp_layers
from shared.model_files.model_dir import ModelDirectoryError

# The defaults of transformers' configuration.
_DEFAULTS: Mapping[str, Any] = {
    "index_n_heads": 32,
    "index_skip_topk_offset": 2,
    "index_topk_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
}
_FULL, _SHARED = "full", "shared"
_LETTERS = {"F": _FULL, "S": _SHARED}


def load_glm_moe_dsa(config: Mapping[str, Any], shard: Shard, *, with_mtp: bool = False) -> DecoderModel:
    """Load a rank's part of the model; `with_mtp` adds the layer that drafts."""
    values = ConfigValues(config, _DEFAULTS)
    # transformers does not read them: other values would be other models.
    values.only("indexer_rope_interleave", True)
    values.only("moe_router_dtype", "float32")
    indexer = _read_indexers(values)
    if with_mtp and indexer.is_shared_by_drafts and num_mtp_layers(values) > 1:
        raise ModelDirectoryError(
            f"config.json: index_share_for_mtp_iteration is not supported with {num_mtp_layers(values)} prediction "
            "layers, of which each has an indexer"
        )
    return load_like_deepseek_v3(values, shard, with_mtp=with_mtp, indexer=indexer)


def _read_indexers(values: ConfigValues) -> IndexerConfig:
    kinds = _read_indexer_types(values)
    if unknown := set(kinds) - {_FULL, _SHARED}:
        raise ModelDirectoryError(f"config.json: indexer_types {sorted(unknown)} are not supported: only full, shared")
    if kinds[0] != _FULL:
        raise ModelDirectoryError("config.json: indexer_types: the first layer shares the indexer of no other")
    return replace(
        read_indexer(values),
        is_interleaved=True,
        shared_layers=frozenset(layer for layer, kind in enumerate(kinds) if kind == _SHARED),
        is_shared_by_drafts=values.flag("index_share_for_mtp_iteration", default=False),
    )


def _read_indexer_types(values: ConfigValues) -> tuple[str, ...]:
    """Each layer's type: by `indexer_types`, or else `index_topk_pattern`, or else a period and where it begins.

    Source: transformers 5, `GlmMoeDsaConfig`.
    """
    num_layers = read_num_layers(values)
    if (kinds := values.texts("indexer_types", num_layers)) is not None:
        return kinds
    if "index_topk_pattern" in values:
        return _read_pattern(values, num_layers)
    period = values.size("index_topk_freq")
    offset = values.count("index_skip_topk_offset")
    return tuple(_SHARED if max(layer - offset + 1, 0) % period else _FULL for layer in range(num_layers))


def _read_pattern(values: ConfigValues, num_layers: int) -> tuple[str, ...]:
    """The types in a string with a letter for each layer, or in a list as in `indexer_types`."""
    pattern = values.json["index_topk_pattern"]
    if not isinstance(pattern, str):
        kinds = values.texts("index_topk_pattern", num_layers)
        assert kinds is not None
        return kinds
    if len(pattern) != num_layers or not set(pattern) <= set(_LETTERS):
        raise ModelDirectoryError(
            f"config.json: index_topk_pattern {pattern!r} is not {num_layers} of the letters F, S"
        )
    return tuple(_LETTERS[letter] for letter in pattern)
