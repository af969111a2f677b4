"""Small configurations of every architecture, with the variations of published checkpoints and error-prone cases.

`SMALL_CONFIGS` is keyed by architecture, then by variant; the first variant of each is the most common. Values are
those of transformers' configuration classes.
"""

from __future__ import annotations

from typing import Any

from tests.support.models.tiny_tokenizer import IM_END_ID, IM_START_ID

Config = dict[str, Any]

VOCABULARY_SIZE = 512
CONTEXT_LENGTH = 512

_DEFAULT_ROPE: Config = {"rope_type": "default", "rope_theta": 10000.0}
_LINEAR_ROPE: Config = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_DYNAMIC_ROPE: Config = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_LLAMA3_ROPE: Config = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE: Config = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
# As in DeepSeek: the factor of the rotary tables differs from that of the softmax scale.
_MSCALE_ROPE: Config = {**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 4.0, "beta_slow": 0.25}
_LATENT_YARN_ROPE: Config = {"rope_parameters": _MSCALE_ROPE, "qk_rope_head_dim": 16}
_GEMMA3_ROPE: Config = {
    "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
_GPT_OSS_ROPE: Config = {**_YARN_ROPE, "rope_theta": 150000.0, "truncate": False}
_MINISTRAL_ROPE: Config = {
    **_YARN_ROPE,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 24,
    "llama_4_scaling_beta": 0.3,
}
# By time, height and width, which is nothing for text.
_SECTIONED_ROPE: Config = {**_DEFAULT_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}

_COMMON: Config = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_parameters": _DEFAULT_ROPE,
    "tie_word_embeddings": False,
    "bos_token_id": IM_START_ID,
    "eos_token_id": IM_END_ID,
}
# So large that a norm with a different epsilon, or one that adds it elsewhere, is detected.
_LARGE_EPS: Config = {"rms_norm_eps": 0.05}

_LLAMA: dict[str, Config] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "wide-heads-linear-rope": {"head_dim": 24, "rope_parameters": _LINEAR_ROPE},
    "llama3-rope": {"rope_parameters": _LLAMA3_ROPE, "head_dim": 32},
    "dynamic-rope": {"rope_parameters": _DYNAMIC_ROPE, "num_hidden_layers": 1},
    "yarn-rope": {"rope_parameters": _YARN_ROPE, "num_hidden_layers": 4},
    "large-eps": _LARGE_EPS,
}

_MISTRAL: dict[str, Config] = {
    "window-of-a-block": {"sliding_window": 16},
    "no-window": {"sliding_window": None, "num_key_value_heads": 4},
    "window-across-blocks": {"sliding_window": 37, "tie_word_embeddings": True},
    "window-of-itself": {"sliding_window": 1, "num_key_value_heads": 1},
    "wide-heads": {"sliding_window": 9, "head_dim": 24, "rope_parameters": _LINEAR_ROPE},
    "large-eps-yarn-rope": {**_LARGE_EPS, "sliding_window": 64, "rope_parameters": _YARN_ROPE},
}

_MINISTRAL: dict[str, Config] = {
    "layer-types": {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]},
    "window-in-every-layer-tied": {"sliding_window": 9, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "full-layers-wide-heads-large-eps": {
        **_LARGE_EPS,
        "sliding_window": 21,
        "layer_types": ["full_attention", "full_attention"],
        "head_dim": 24,
    },
}

_MINISTRAL3: dict[str, Config] = {
    "plain": {"num_hidden_layers": 3},
    "wide-heads-tied": {"head_dim": 24, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "window-large-eps": {
        **_LARGE_EPS,
        "sliding_window": 21,
        "num_key_value_heads": 1,
        "rope_parameters": {**_MINISTRAL_ROPE, "original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.4},
    },
}

_MISTRAL3: dict[str, Config] = {
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "ministral3": {"model_type": "ministral3", "rope_parameters": _MINISTRAL_ROPE, "num_key_value_heads": 4},
    "mistral-tied-large-eps": {
        **_LARGE_EPS,
        "model_type": "mistral",
        "sliding_window": 19,
        "tie_word_embeddings": True,
    },
}

_QWEN2_VL: dict[str, Config] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "windows-in-later-layers-large-eps": {
        **_LARGE_EPS,
        "use_sliding_window": True,
        "sliding_window": 21,
        "max_window_layers": 1,
    },
}

_QWEN3_VL: dict[str, Config] = {
    "plain": {"head_dim": 16, "rope_parameters": _SECTIONED_ROPE},
    "tied-biases": {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1},
    "yarn-rope-large-eps": {
        **_LARGE_EPS,
        "head_dim": 24,
        "rope_parameters": {**_YARN_ROPE, "mrope_section": [4, 4, 4], "mrope_interleaved": True},
    },
}

_QWEN3_VL_MOE: dict[str, Config] = {
    "plain": {"rope_parameters": _SECTIONED_ROPE},
    "sparse-every-other-layer-tied": {"decoder_sparse_step": 2, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "many-experts-large-eps": {
        **_LARGE_EPS,
        "num_experts": 16,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 16,
        "head_dim": 32,
    },
}

_KIMI_K25: dict[str, Config] = {
    "plain": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
    "yarn-rope-tied": {**_LATENT_YARN_ROPE, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    "groups-large-eps": _LARGE_EPS,
}

_QWEN2: dict[str, Config] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "windows-in-later-layers": {
        "use_sliding_window": True,
        "sliding_window": 21,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "window-not-in-use": {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0},
    "yarn-rope": {"rope_parameters": _YARN_ROPE, "num_key_value_heads": 4},
    "layer-types": {
        "use_sliding_window": True,
        "sliding_window": 16,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "large-eps": _LARGE_EPS,
}

_QWEN3: dict[str, Config] = {
    "plain": {"head_dim": 16},
    "wide-heads": {"head_dim": 32, "num_key_value_heads": 1},
    "tied": {"head_dim": 16, "tie_word_embeddings": True},
    "biases": {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 4},
    "windows-in-later-layers": {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 19,
        "max_window_layers": 1,
    },
    "yarn-rope": {"head_dim": 24, "rope_parameters": _YARN_ROPE, "num_hidden_layers": 3},
    "large-eps": {**_LARGE_EPS, "head_dim": 16},
}

_QWEN3_MOE: dict[str, Config] = {
    "plain": {},
    "renormalised": {"norm_topk_prob": True, "num_experts_per_tok": 3},
    "many-experts": {"num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 16},
    "sparse-every-other-layer": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "dense-first-layer": {"mlp_only_layers": [0], "num_hidden_layers": 3, "tie_word_embeddings": True},
    "biases-wide-heads": {"attention_bias": True, "head_dim": 32, "num_key_value_heads": 1},
    "window": {"use_sliding_window": True, "sliding_window": 23, "norm_topk_prob": True},
    "yarn-rope-large-eps": {**_LARGE_EPS, "rope_parameters": _YARN_ROPE, "num_experts_per_tok": 1},
}

_MIXTRAL: dict[str, Config] = {
    "plain": {},
    "one-expert-a-token": {"num_experts_per_tok": 1, "num_key_value_heads": 4},
    "many-experts": {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 24},
    "window": {"sliding_window": 17, "num_hidden_layers": 3},
    "tied-wide-heads": {"tie_word_embeddings": True, "head_dim": 24, "num_key_value_heads": 1},
    "all-experts": {"num_local_experts": 4, "num_experts_per_tok": 4},
    "linear-rope-large-eps": {**_LARGE_EPS, "rope_parameters": _LINEAR_ROPE},
}

_DEEPSEEK_V2: dict[str, Config] = {
    "plain": {},
    "query-lora": {"q_lora_rank": 24, "num_attention_heads": 8, "num_key_value_heads": 8},
    "group-limited": {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "biases": {"attention_bias": True, "q_lora_rank": 24, "mlp_bias": True},
    "no-dense-layer-tied": {"first_k_dense_replace": 0, "tie_word_embeddings": True, "n_shared_experts": 1},
    "dense-layers-only": {"first_k_dense_replace": 2, "kv_lora_rank": 40},
    "yarn-rope": {**_LATENT_YARN_ROPE, "v_head_dim": 24},
    "large-eps": {**_LARGE_EPS, "q_lora_rank": 16},
}

_DEEPSEEK_V3: dict[str, Config] = {
    "plain": {},
    "no-query-lora": {"q_lora_rank": None, "num_attention_heads": 8, "num_key_value_heads": 8},
    "one-group": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "many-experts": {
        "n_routed_experts": 32,
        "n_group": 8,
        "topk_group": 3,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 16,
        "routed_scaling_factor": 2.5,
    },
    "half-split-rope": {"rope_interleave": False, "v_head_dim": 24, "kv_lora_rank": 40},
    "yarn-rope": {**_LATENT_YARN_ROPE, "num_hidden_layers": 3, "first_k_dense_replace": 2},
    "biases-tied": {"attention_bias": True, "tie_word_embeddings": True, "n_shared_experts": 2},
    "large-eps": {**_LARGE_EPS, "first_k_dense_replace": 0},
}

_DEEPSEEK_V32: dict[str, Config] = {
    "plain": {},
    "few-selected": {"index_topk": 5, "num_attention_heads": 8, "num_key_value_heads": 8},
    "all-selected": {"index_topk": CONTEXT_LENGTH},
    "wide-index-heads": {"index_head_dim": 32, "index_n_heads": 24, "v_head_dim": 24},
    "yarn-rope": {**_LATENT_YARN_ROPE, "index_topk": 33},
    "biases": {"attention_bias": True, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3},
    "layer-mix": {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_hidden_layers": 3, "index_topk": 16},
    "large-eps": {**_LARGE_EPS, "index_topk": 48, "routed_scaling_factor": 1.0},
}

_GPT_OSS: dict[str, Config] = {
    "plain": {},
    "tight-clamp": {"swiglu_limit": 0.5, "num_experts_per_tok": 3},
    "window-across-blocks": {"sliding_window": 37, "num_attention_heads": 8, "head_dim": 8},
    "full-layers-only": {"layer_types": ["full_attention", "full_attention"], "num_key_value_heads": 4},
    "sliding-layers-only": {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 5},
    "default-rope-tied": {"rope_parameters": _DEFAULT_ROPE, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "many-experts-large-eps": {
        **_LARGE_EPS,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
    },
}

_GLM4_MOE: dict[str, Config] = {
    "plain": {},
    "query-key-norms": {"use_qk_norm": True, "attention_bias": True},
    "groups": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5},
    "wide-heads": {"head_dim": 32, "num_key_value_heads": 1, "norm_topk_prob": False},
    "whole-rotary": {"rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 1.0}, "first_k_dense_replace": 0},
    "quarter-rotary-tied": {
        "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.25},
        "head_dim": 32,
        "tie_word_embeddings": True,
        "n_shared_experts": 2,
    },
    "many-experts-large-eps": {
        **_LARGE_EPS,
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 2,
        "use_qk_norm": True,
    },
}

_GLM4V_MOE: dict[str, Config] = {
    "plain": {},
    "no-biases-tied": {"attention_bias": False, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "groups-large-eps": {
        **_LARGE_EPS,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
    },
    "many-experts-whole-rotary": {
        "n_routed_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 2,
        "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 3, 3]},
    },
}

_GLM4_MOE_LITE: dict[str, Config] = {
    "plain": {},
    "no-query-lora": {"q_lora_rank": None, "num_attention_heads": 6, "num_key_value_heads": 6},
    "half-split-rope": {"rope_interleave": False, "v_head_dim": 24, "kv_lora_rank": 40},
    "many-experts-groups": {
        "n_routed_experts": 32,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
    },
    "layer-mix-biases": {
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "num_hidden_layers": 3,
        "attention_bias": True,
        "n_shared_experts": 2,
    },
    "yarn-rope-large-eps-tied": {**_LARGE_EPS, **_LATENT_YARN_ROPE, "tie_word_embeddings": True},
}

_GLM_MOE_DSA: dict[str, Config] = {
    # As in GLM-5.2: full, full, shared, full, ...
    "plain": {
        "num_hidden_layers": 4,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 2,
        "index_share_for_mtp_iteration": True,
    },
    # As in GLM-5 and 5.1.
    "no-shared-indexer": {"num_attention_heads": 8, "num_key_value_heads": 8, "index_topk": 5},
    "pattern": {"num_hidden_layers": 5, "index_topk_pattern": "FSSFS", "index_topk": 7, "first_k_dense_replace": 3},
    "types": {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "shared"], "v_head_dim": 24},
    "all-selected": {"index_topk": CONTEXT_LENGTH, "index_topk_freq": 2, "num_hidden_layers": 3},
    "groups-biases": {
        "attention_bias": True,
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "index_head_dim": 32,
        "index_n_heads": 24,
    },
    "layer-mix-yarn-rope": {
        **_LATENT_YARN_ROPE,
        "mlp_layer_types": ["sparse", "dense"],
        "index_topk": 33,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
    },
    "large-eps": {**_LARGE_EPS, "index_topk": 48, "routed_scaling_factor": 1.0, "norm_topk_prob": False},
}

# Queries are scaled by another number than the width of their heads, and windows end within and between blocks.
_GEMMA3: dict[str, Config] = {
    "plain": {},
    "published-pattern": {"sliding_window_pattern": 6, "num_hidden_layers": 7, "sliding_window": 37},
    "wide-heads-linear-rope": {
        "head_dim": 256,
        "num_key_value_heads": 1,
        "rope_parameters": {**_GEMMA3_ROPE, "full_attention": {**_LINEAR_ROPE, "rope_theta": 50000.0}},
    },
    "untied-biases": {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 4},
    "layer-types-yarn-rope": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
        "rope_parameters": {**_GEMMA3_ROPE, "full_attention": _YARN_ROPE},
    },
    "sliding-layers-only": {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 5},
    "full-layers-only-large-eps": {**_LARGE_EPS, "layer_types": ["full_attention", "full_attention"]},
}

_QWEN3_NEXT: dict[str, Config] = {
    "plain": {},
    "wide-heads-dense-layers": {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 8,
        "mlp_only_layers": [0],
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "layer-types-tied-biases": {
        "layer_types": ["full_attention", "linear_attention"],
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 3,
    },
    "half-rotary-large-eps": {
        **_LARGE_EPS,
        "norm_topk_prob": False,
        "num_experts": 16,
        "num_experts_per_tok": 5,
        "decoder_sparse_step": 2,
        "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.5},
    },
}
_QWEN3_5: dict[str, Config] = {
    "plain": {},
    "wide-heads-tied": {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 24,
        "linear_value_head_dim": 8,
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "layer-types-large-eps": {
        **_LARGE_EPS,
        "layer_types": ["full_attention", "linear_attention"],
        "num_hidden_layers": 2,
        "attention_bias": True,
        "num_key_value_heads": 4,
    },
}

_EXPERTS: Config = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_LATENT: Config = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_GROUPS: Config = {"q_lora_rank": 24, "n_group": 4, "topk_group": 2}
# Many heads: tokens that all heads score 0 tie, and topk's order among ties is undefined.
_INDEXER: Config = {"index_topk": 24, "index_n_heads": 16, "index_head_dim": 16}

# The root of the hidden size is no number of bfloat16.
_GEMMA3_BASE: Config = {
    "hidden_size": 96,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "rope_parameters": _GEMMA3_ROPE,
}

_DELTA: Config = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.25},
}
_SHARED_EXPERT: Config = {
    **_EXPERTS,
    "num_experts": 8,
    "shared_expert_intermediate_size": 40,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
}

_QWEN2_VL_BASE: Config = {"rope_parameters": {**_DEFAULT_ROPE, "mrope_section": [2, 3, 3]}}
_GLM4_MOE_BASE: Config = {
    **_EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.5},
}

_BASES: dict[str, Config] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "MinistralForCausalLM": {"head_dim": 16},
    "Ministral3ForCausalLM": {"head_dim": 16, "rope_parameters": _MINISTRAL_ROPE},
    "Mistral3ForConditionalGeneration": {"head_dim": 16},
    "Qwen2VLForConditionalGeneration": _QWEN2_VL_BASE,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_VL_BASE,
    "Qwen3VLForConditionalGeneration": {},
    "Qwen3VLMoeForConditionalGeneration": {**_EXPERTS, "num_experts": 8, "head_dim": 16},
    "Kimi_K25ForConditionalGeneration": {**_EXPERTS, **_LATENT, **_GROUPS},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {**_EXPERTS, "num_experts": 8, "head_dim": 16},
    "Qwen3NextForCausalLM": {**_DELTA, **_SHARED_EXPERT},
    "Qwen3_5ForConditionalGeneration": _DELTA,
    "Qwen3_5MoeForConditionalGeneration": {**_DELTA, **_SHARED_EXPERT},
    "MixtralForCausalLM": {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV2ForCausalLM": {**_EXPERTS, **_LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    "DeepseekV3ForCausalLM": {**_EXPERTS, **_LATENT, **_GROUPS},
    "DeepseekV32ForCausalLM": {**_EXPERTS, **_LATENT, **_GROUPS, **_INDEXER},
    "GptOssForCausalLM": {
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "rope_parameters": _GPT_OSS_ROPE,
    },
    "Gemma3ForCausalLM": _GEMMA3_BASE,
    "Gemma3ForConditionalGeneration": _GEMMA3_BASE,
    "Glm4MoeForCausalLM": _GLM4_MOE_BASE,
    "Glm4vMoeForConditionalGeneration": {
        **_GLM4_MOE_BASE,
        "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    },
    "Glm4MoeLiteForCausalLM": {**_EXPERTS, **_LATENT, "q_lora_rank": 24, "v_head_dim": 20},
    "GlmMoeDsaForCausalLM": {**_EXPERTS, **_LATENT, **_INDEXER, "q_lora_rank": 24, "v_head_dim": 20},
}
_CHANGES: dict[str, dict[str, Config]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MINISTRAL,
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Mistral3ForConditionalGeneration": _MISTRAL3,
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_VL,
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL_MOE,
    "Kimi_K25ForConditionalGeneration": _KIMI_K25,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "MixtralForCausalLM": _MIXTRAL,
    "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": _DEEPSEEK_V32,
    "GptOssForCausalLM": _GPT_OSS,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": {
        name: _GEMMA3[name] for name in ("plain", "published-pattern", "layer-types-yarn-rope")
    },
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "Glm4MoeLiteForCausalLM": _GLM4_MOE_LITE,
    "Glm4vMoeForConditionalGeneration": _GLM4V_MOE,
    "GlmMoeDsaForCausalLM": _GLM_MOE_DSA,
}

SMALL_CONFIGS: dict[str, dict[str, Config]] = {
    architecture: {variant: {**_COMMON, **_BASES[architecture], **changes} for variant, changes in variants.items()}
    for architecture, variants in _CHANGES.items()
}
ARCHITECTURES = tuple(SMALL_CONFIGS)
