"""Small configurations of architectures that transformers' own code computes, made as those of `small_configs`."""

from __future__ import annotations

from typing import Any

from tests.support.models.small_configs import CONTEXT_LENGTH, VOCABULARY_SIZE
from tests.support.models.tiny_tokenizer import IM_END_ID, IM_START_ID

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": IM_START_ID,
    "eos_token_id": IM_END_ID,
    "pad_token_id": IM_END_ID,
    "tie_word_embeddings": False,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
_WINDOWS = {"sliding_window": 24, "layer_types": _ALTERNATING}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 48}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_SCALED = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}

# By architecture: what differs from what all have.
_CHANGES: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": {**_ROUTED, **_LATENT},
    "AfmoeForCausalLM": {**_WINDOWS, **_EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 16},
    "ApertusForCausalLM": {},
    "ArceeForCausalLM": {},
    "Cohere2ForCausalLM": {**_WINDOWS, "tie_word_embeddings": True, "logit_scale": 0.5},
    "Cohere2MoeForCausalLM": {**_WINDOWS, **_EXPERTS, "num_shared_experts": 1, "head_dim": 16},
    "CohereForCausalLM": {"tie_word_embeddings": True, "logit_scale": 0.5, "use_qk_norm": True},
    "CwmForCausalLM": {**_WINDOWS, "head_dim": 16},
    "DiffLlamaForCausalLM": {},
    "Dots1ForCausalLM": {**_ROUTED, "head_dim": 16},
    "Ernie4_5ForCausalLM": {"head_dim": 16, "use_bias": True},
    "Ernie4_5_MoeForCausalLM": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "Exaone4ForCausalLM": {**_WINDOWS},
    "ExaoneMoeForCausalLM": {**_WINDOWS, **_EXPERTS, "num_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "FlexOlmoForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "FlintForCausalLM": {**_WINDOWS, **_SHARED, "mlp_only_layers": [0], "head_dim": 16},
    "GPT2LMHeadModel": {"tie_word_embeddings": True},
    "GPTBigCodeForCausalLM": {"n_inner": 96},
    "GPTNeoXForCausalLM": {},
    "GemmaForCausalLM": {"head_dim": 16, "tie_word_embeddings": True},
    "Glm4ForCausalLM": {"head_dim": 16},
    "GlmForCausalLM": {"head_dim": 16},
    "GraniteForCausalLM": {**_SCALED, "tie_word_embeddings": True},
    "GraniteMoeForCausalLM": {**_SCALED, **_LOCAL_EXPERTS},
    "GraniteMoeSWAForCausalLM": {**_SCALED, **_LOCAL_EXPERTS, **_WINDOWS},
    "GraniteMoeSharedForCausalLM": {**_SCALED, **_LOCAL_EXPERTS, "shared_intermediate_size": 48},
    "GraniteSWAForCausalLM": {**_SCALED, **_WINDOWS},
    "HYV3ForCausalLM": {**_EXPERTS, "num_shared_experts": 1, "head_dim": 16},
    "HeliumForCausalLM": {"head_dim": 16},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "HyperCLOVAXForCausalLM": {},
    "Jais2ForCausalLM": {},
    "Kolibri1ForCausalLM": {
        **_WINDOWS,
        **_LOCAL_EXPERTS,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "head_dim": 16,
    },
    "LagunaForCausalLM": {**_SHARED, "head_dim": 16},
    "MellumForCausalLM": {**_WINDOWS, **_EXPERTS, "head_dim": 16},
    "MiMoV2FlashForCausalLM": {
        **_WINDOWS,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "MiniCPM3ForCausalLM": {**_LATENT, "head_dim": 8, "dim_model_base": 32},
    "MiniMaxM2ForCausalLM": {**_LOCAL_EXPERTS, "head_dim": 16},
    "ModernBertDecoderForCausalLM": {"layer_types": _ALTERNATING, "local_attention": 48, "tie_word_embeddings": True},
    "NanoChatForCausalLM": {},
    "NemotronForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": {**_WINDOWS},
    "OlmoForCausalLM": {},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    # The embeddings are narrower than the layers.
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 48, "tie_word_embeddings": True},
    "PersimmonForCausalLM": {},
    "Phi3ForCausalLM": {"sliding_window": 24},
    "PhiForCausalLM": {},
    "PhimoeForCausalLM": {**_LOCAL_EXPERTS},
    "Qwen2MoeForCausalLM": {**_SHARED},
    "SeedOssForCausalLM": {"head_dim": 16, "attention_bias": True},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
    "SolarOpenForCausalLM": {**_ROUTED, "head_dim": 16},
    "Starcoder2ForCausalLM": {"sliding_window": 24, "use_bias": True},
    "YoutuForCausalLM": {**_LATENT, "tie_word_embeddings": True},
}

GENERIC_CONFIGS: dict[str, dict[str, Any]] = {name: {**_BASE, **changes} for name, changes in _CHANGES.items()}
"""By architecture; values are those of transformers' configuration classes."""

FAST = (
    "GraniteForCausalLM",
    "Olmo2ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
)
"""Those of `make test`."""
