"""Configurations as published, without what nothing here reads, and miniatures of their kinds for a CPU.

The vocabulary is read by the head, so it counts.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_COMMON: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_QWEN3_8B: Config = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
_TINY: Config = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
_EXPERTS: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LATENT: Config = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "rope_theta": 10000,
    "num_nextn_predict_layers": 0,
}
_GPT_OSS: Config = {
    **_COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}


def _fp8_blocks(size: int) -> Config:
    return {"quant_method": "fp8", "weight_block_size": [size, size]}


def _int4_groups(size: int) -> Config:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


CONFIGS: dict[str, Config] = {
    "qwen3-0.6b": {
        **_QWEN3_8B,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3_8B,
    "llama-3.1-8b": {
        **_QWEN3_8B,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "qwen3-8b-fp8": {**_QWEN3_8B, "quantization_config": _fp8_blocks(128)},
    "qwen3-8b-int4": {**_QWEN3_8B, "quantization_config": _int4_groups(128)},
    "qwen3-30b-a3b": {
        **_QWEN3_8B,
        **_EXPERTS,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    # With 4 of its 61 layers, of which one is dense instead of 3.
    "deepseek-v3-4l": {
        **_COMMON,
        **_LATENT,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": _fp8_blocks(128),
    },
    "gpt-oss-20b": {
        **_GPT_OSS,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "sliding_window": 128,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    "tiny": _TINY,
    "tiny-fp8": {**_TINY, "quantization_config": _fp8_blocks(32)},
    "tiny-int4": {**_TINY, "quantization_config": _int4_groups(32)},
    "tiny-experts": {
        **_TINY,
        **_EXPERTS,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "tiny-latent": {
        **_TINY,
        **_LATENT,
        "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "quantization_config": _fp8_blocks(32),
    },
    "tiny-mxfp4": {
        **_TINY,
        **_GPT_OSS,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "sliding_window": 16,
        "vocab_size": 512,
    },
}
