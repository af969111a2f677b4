"""What each family reads from config.json, and what it refuses."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GlmMoeDsaConfig

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.llama import qwen_windows
from services.worker.models.parts.plain_attention import FULL, SLIDING, windows_by_type
from services.worker.models.registry import CausalLM, loader_for
from services.worker.ops import load_ops
from services.worker.weights.dummy_weights import DummyWeights
from shared.model_files.model_dir import ModelDirectoryError

COMMON: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 8,
    "index_head_dim": 16,
}
_TYPES = ["full", "shared", "shared", "full"]
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Gemma3ForCausalLM": {"head_dim": 8},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Glm4MoeForCausalLM": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    "Glm4MoeLiteForCausalLM": {**_LATENT, "n_routed_experts": None},
    "GlmMoeDsaForCausalLM": {**_LATENT, "n_routed_experts": 16, "num_hidden_layers": 4},
}


@cache
def shard() -> Shard:
    """What every model here is built from."""
    return Shard(load_ops("native"), DummyWeights(1, torch.float32))


def build(architecture: str, changes: Mapping[str, Any] | None = None) -> CausalLM:
    """A model with random weights; a change to None removes the value."""
    config = {**COMMON, **CONFIGS[architecture], **(changes or {}), "architectures": [architecture]}
    config = {name: value for name, value in config.items() if value is not None}
    return loader_for(config)(config, shard())


@pytest.mark.parametrize("architecture", CONFIGS)
def test_values_that_publishers_omit_have_defaults(architecture: str) -> None:
    model = build(architecture)
    assert (model.logits_width, model.context_length, model.dtype) == (32, 64, torch.float32)
    assert len(model.kv_cache_spec.layers) == {**COMMON, **CONFIGS[architecture]}["num_hidden_layers"]
    assert model.mtp is None


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ("LlamaForCausalLM", {"vocab_size": None}, "vocab_size is missing"),
        ("LlamaForCausalLM", {"vocab_size": "32"}, "vocab_size is '32', not a whole number"),
        ("LlamaForCausalLM", {"vocab_size": 32.5}, "vocab_size is 32.5, not a whole number"),
        ("LlamaForCausalLM", {"num_hidden_layers": True}, "num_hidden_layers is True, not a whole number"),
        ("LlamaForCausalLM", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be at most 10000"),
        ("LlamaForCausalLM", {"hidden_size": 2}, "1 of a head's 1 columns are rotated"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ("LlamaForCausalLM", {"head_dim": 7}, "7 of a head's 7 columns are rotated"),
        ("LlamaForCausalLM", {"attention_bias": 1}, "attention_bias is 1, neither true nor false"),
        ("LlamaForCausalLM", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a number"),
        ("LlamaForCausalLM", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window is 0, must be at least 1"),
        ("Qwen2ForCausalLM", {"layer_types": [FULL]}, "layer_types is not a list of 3 strings"),
        ("Qwen2ForCausalLM", {"layer_types": [FULL, FULL, "chunked"]}, r"layer_types \['chunked'\] are not supported"),
        ("Qwen3ForCausalLM", {"layer_types": [FULL, FULL, SLIDING]}, "has sliding windows, but no window"),
        ("Qwen3MoeForCausalLM", {"num_experts": None}, "num_experts or num_local_experts is missing"),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but there are 4"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [-1]}, "mlp_only_layers is not a list of non-negative"),
        ("MixtralForCausalLM", {"num_local_experts": 1}, "num_experts_per_tok is 2, but there are 1"),
        ("GptOssForCausalLM", {"swiglu_limit": "7"}, "swiglu_limit is '7', not a number"),
        (
            "Gemma3ForCausalLM",
            {"hidden_activation": "gelu"},
            "hidden_activation 'gelu' is not supported; supported: gel",
        ),
        ("Gemma3ForCausalLM", {"hidden_act": "silu"}, "hidden_act is 'silu', which is not supported; supported: 'gel"),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which is not supp"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not supp"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, which is"),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, must be at least 1"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0, must be at least 1"),
        ("Gemma3ForCausalLM", {"rope_local_base_freq": -1}, "rope_local_base_freq is -1.0, must be above 0"),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"factor": 8}},
            "rope_parameters has 'factor', but this architecture",
        ),
        ("Gemma3ForCausalLM", {"rope_parameters": {FULL: 1}}, "rope_parameters: full_attention is 1, not an object"),
        ("Gemma3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling has 'type', but this"),
        ("Gemma3ForCausalLM", {"rope_scaling": "linear"}, "rope_scaling is 'linear', not an object"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, "8 experts cannot be split into"),
        ("Glm4MoeForCausalLM", {"n_group": 8}, "8 experts cannot be split into"),
        ("Glm4MoeForCausalLM", {"n_group": 2, "topk_group": 3}, "8 experts cannot be split into"),
        ("Glm4MoeForCausalLM", {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok is 3, but there are 2"),
        ("Glm4MoeForCausalLM", {"partial_rotary_factor": 0.1}, "0 of a head's 8 columns are rotated"),
        ("Glm4MoeForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("Glm4MoeLiteForCausalLM", {"first_k_dense_replace": 0}, "first_k_dense_replace is 0, which is not supported"),
        ("Glm4MoeLiteForCausalLM", {"head_dim": 24}, "head_dim is 24, which is not supported; supported: 8"),
        ("GlmMoeDsaForCausalLM", {"num_hidden_layers": 2**40}, "num_hidden_layers is 1099511627776, must be at most"),
        ("GlmMoeDsaForCausalLM", {"q_lora_rank": None}, "q_lora_rank is missing, but the indexer needs it"),
        ("GlmMoeDsaForCausalLM", {"index_head_dim": 4}, "index_head_dim 4 is less than qk_rope_head_dim 8"),
        ("GlmMoeDsaForCausalLM", {"indexer_types": _TYPES[:3]}, "indexer_types is not a list of 4 strings"),
        ("GlmMoeDsaForCausalLM", {"indexer_types": [*_TYPES[:3], "F"]}, r"indexer_types \['F'\] are not supported"),
        ("GlmMoeDsaForCausalLM", {"indexer_types": _TYPES[1:] * 2}, "indexer_types is not a list of 4 strings"),
        ("GlmMoeDsaForCausalLM", {"indexer_types": ["shared"] * 4}, "the first layer shares the indexer of no other"),
        ("GlmMoeDsaForCausalLM", {"index_topk_pattern": "SFFF"}, "the first layer shares the indexer of no other"),
        ("GlmMoeDsaForCausalLM", {"index_topk_pattern": "FSF"}, "index_topk_pattern 'FSF' is not 4 of the letters"),
        ("GlmMoeDsaForCausalLM", {"index_topk_pattern": "FsFF"}, "index_topk_pattern 'FsFF' is not 4 of the letters"),
        ("GlmMoeDsaForCausalLM", {"index_topk_pattern": 4}, "index_topk_pattern is not a list of 4 strings"),
        ("GlmMoeDsaForCausalLM", {"index_topk_freq": 0}, "index_topk_freq is 0, must be at least 1"),
        ("GlmMoeDsaForCausalLM", {"index_topk_freq": 4, "index_skip_topk_offset": 0}, "the first layer shares"),
        ("GlmMoeDsaForCausalLM", {"indexer_rope_interleave": False}, "indexer_rope_interleave is False, which is not"),
        ("GlmMoeDsaForCausalLM", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype is 'bfloat16', which is not"),
        ("GlmMoeDsaForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq is 2, which is not supported"),
        ("GlmMoeDsaForCausalLM", {"index_share_for_mtp_iteration": 1}, "index_share_for_mtp_iteration is 1, neither"),
    ],
)
def test_an_invalid_configuration_is_refused_with_the_value(
    architecture: str, changes: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ModelDirectoryError, match=f"config.json: .*{message}"):
        build(architecture, changes)


@pytest.mark.parametrize(
    ("changes", "with_indexer"),
    [
        ({}, [0, 1, 2, 3]),
        # As in GLM-5.2, of 78 layers.
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3, "num_hidden_layers": 12}, [0, 1, 2, 6, 10]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [0, 3]),
        ({"index_topk_freq": 3}, [0, 1]),
        ({"index_topk_pattern": "FSSF", "index_topk_freq": 2}, [0, 3]),
        ({"index_topk_pattern": _TYPES}, [0, 3]),
        ({"indexer_types": _TYPES, "index_topk_pattern": "FFFF", "index_topk_freq": 2}, [0, 3]),
    ],
)
def test_glm_5_says_in_three_ways_which_layers_have_an_indexer(
    changes: Mapping[str, Any], with_indexer: list[int]
) -> None:
    layers = build("GlmMoeDsaForCausalLM", changes).kv_cache_spec.layers
    assert [number for number, layer in enumerate(layers) if len(layer) == 2] == with_indexer
    config = GlmMoeDsaConfig(**{**COMMON, **CONFIGS["GlmMoeDsaForCausalLM"], **changes})
    assert [number for number, kind in enumerate(config.indexer_types) if kind == "full"] == with_indexer


def test_an_unsupported_architecture_is_refused_with_a_list_of_the_supported_ones() -> None:
    with pytest.raises(ModelDirectoryError, match="MambaForCausalLM") as error:
        loader_for({"architectures": ["MambaForCausalLM"]})
    assert all(architecture in str(error.value) for architecture in CONFIGS)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [None, None, None]),
        ({"sliding_window": 8, "use_sliding_window": False}, [None, None, None]),
        ({"sliding_window": 8, "use_sliding_window": True}, [None, None, None]),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [None, 8, 8]),
        ({"use_sliding_window": True, "max_window_layers": 2}, [None, None, 4096]),
        ({"sliding_window": 8, "use_sliding_window": True, "layer_types": [SLIDING, FULL, FULL]}, [8, None, None]),
    ],
)
def test_qwens_sliding_windows_apply_to_some_layers(config: Mapping[str, Any], expected: list[int | None]) -> None:
    assert qwen_windows(ConfigValues(config), 3) == expected


def test_layer_types_override_the_familys_pattern() -> None:
    values = ConfigValues({"layer_types": [FULL, SLIDING]})
    assert windows_by_type(values, 8, [SLIDING, FULL]) == [None, 8]
    assert windows_by_type(ConfigValues({"layer_types": None}), 8, [SLIDING, FULL]) == [8, None]


def test_the_first_present_name_of_a_value_counts() -> None:
    values = ConfigValues(json.loads('{"old": 3, "new": 4, "none": null}'))
    assert values.size("new", "old") == 4
    assert values.size("missing", "none", "old") == 3
    assert values.size("missing", default=5) == 5


WINDOWED: dict[str, tuple[dict[str, Any], int, int]] = {
    "GptOssForCausalLM": ({"sliding_window": 16}, 2, 16),
    "Gemma3ForCausalLM": ({"sliding_window": 10, "sliding_window_pattern": 3}, 2, 10),
    "MistralForCausalLM": ({"sliding_window": 63}, 3, 63),
    "Qwen3ForCausalLM": ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, 1, 5),
}


@pytest.mark.parametrize("architecture", WINDOWED)
def test_what_layers_with_a_window_keep_in_vain_is_logged_once(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    changes, num_layers, window = WINDOWED[architecture]
    model = build(architecture, changes)
    [record] = [record for record in caplog.records if "layers with a window" in record.message]
    layer_bytes = model.kv_cache_spec.bytes_per_token // 3
    assert (
        vars(record).items()
        >= {
            "layers": num_layers,
            "window": window,
            "bytes_per_token": num_layers * layer_bytes,
            "bytes_per_context": num_layers * layer_bytes * 64,
            "bytes_read": num_layers * layer_bytes * window,
        }.items()
    )


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("LlamaForCausalLM", {}), ("MistralForCausalLM", {"sliding_window": 64}), ("Qwen3ForCausalLM", {})],
)
def test_nothing_is_logged_where_no_window_is_shorter_than_the_context(
    architecture: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    build(architecture, changes)
    assert "layers with a window" not in caplog.text
