"""What each family reads from config.json, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from services.worker.layers.shard import Shard
from services.worker.models.config import ConfigValues
from services.worker.models.llama import qwen_windows
from services.worker.models.parts.plain_attention import FULL, SLIDING, windows_by_type
from services.worker.models.registry import CausalLM, loader_for
from services.worker.ops import load_ops
from services.worker.weights.dummy_weights import DummyWeights
from shared.model_dir import ModelDirectoryError

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
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "MixtralForCausalLM": {"num_local_experts": 4},
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
}


def build(architecture: str, changes: Mapping[str, Any] | None = None) -> CausalLM:
    """A model with random weights; a change to None removes the value."""
    config = {**COMMON, **CONFIGS[architecture], **(changes or {}), "architectures": [architecture]}
    config = {name: value for name, value in config.items() if value is not None}
    return loader_for(config)(config, Shard(load_ops("cpu"), DummyWeights(1, torch.float32)))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_values_that_publishers_omit_have_defaults(architecture: str) -> None:
    model = build(architecture)
    assert (model.logits_width, model.context_length, model.dtype) == (32, 64, torch.float32)
    assert len(model.kv_cache_spec.layers) == 3
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
        ("Glm4MoeForCausalLM", {"n_group": 3}, "8 experts cannot be split into"),
        ("Glm4MoeForCausalLM", {"n_group": 8}, "8 experts cannot be split into"),
        ("Glm4MoeForCausalLM", {"n_group": 2, "topk_group": 3}, "8 experts cannot be split into"),
        ("Glm4MoeForCausalLM", {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok is 3, but there are 2"),
        ("Glm4MoeForCausalLM", {"partial_rotary_factor": 0.1}, "0 of a head's 8 columns are rotated"),
        ("Glm4MoeForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    ],
)
def test_an_invalid_configuration_is_refused_with_the_value(
    architecture: str, changes: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ModelDirectoryError, match=f"config.json: .*{message}"):
        build(architecture, changes)


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
