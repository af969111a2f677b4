"""How configurations describe latent attention, and what it keeps in the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from services.worker.forward.kv_cache import CacheTensor
from services.worker.layers.context_limit import NO_LIMIT
from services.worker.layers.mla import LatentSizes
from services.worker.models.config import ConfigValues
from services.worker.models.parts.decoder import DecoderConfig
from services.worker.models.parts.latent_attention import IndexerConfig, LatentAttentionConfig
from shared.model_files.model_dir import ModelDirectoryError

CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
INDEXER = IndexerConfig(num_heads=4, head_dim=16, num_selected=32)


def read(
    *, has_rope_choice: bool = False, indexer: IndexerConfig | None = None, **changes: Any
) -> LatentAttentionConfig:
    values = ConfigValues({**CONFIG, **changes})
    common = DecoderConfig.from_json(values, NO_LIMIT)
    return LatentAttentionConfig.from_json(values, common, has_rope_choice=has_rope_choice, indexer=indexer)


def test_the_sizes_are_read() -> None:
    config = read()
    assert config.sizes == LatentSizes(4, 16, 8, 12, 24, 20)
    assert (config.has_bias, config.is_interleaved, config.scale) == (False, True, 24**-0.5)
    assert read(q_lora_rank=None).sizes.query_latent_dim is None
    assert not read(has_rope_choice=True, rope_interleave=False).is_interleaved


def test_yarns_temperature_is_part_of_the_softmax_scale() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    assert read(rope_parameters=yarn).scale == read().scale
    assert read(rope_parameters={**yarn, "mscale_all_dim": 0.7}).scale > 1.2 * read().scale


def test_a_token_keeps_its_latent_and_its_index_key_where_there_is_an_indexer() -> None:
    latent = CacheTensor((32,), torch.float32)
    assert read().layer_cache(0, torch.float32) == (latent,)
    shared = read(indexer=replace(INDEXER, shared_layers=frozenset({1})))
    assert shared.layer_cache(0, torch.float32) == (latent, CacheTensor((16,), torch.float32))
    assert shared.layer_cache(1, torch.float32) == (latent,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({"kv_lora_rank": None}, "kv_lora_rank is null"),
        ({"v_head_dim": 0}, "v_head_dim is 0, must be at least 1"),
        ({"q_lora_rank": None}, "q_lora_rank is missing, but the indexer needs it"),
        ({"rope_interleave": False}, "rope_interleave is False, which is not supported; supported: True"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, which is not supported; supported: 4"),
        ({"qk_rope_head_dim": 18}, "index_head_dim 16 is less than qk_rope_head_dim 18"),
    ],
)
def test_inconsistent_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelDirectoryError, match=message):
        read(indexer=INDEXER, **changes)
