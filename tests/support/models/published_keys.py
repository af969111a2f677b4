"""Keys of config.json as publishers write them, of a whole and of its text together."""

from __future__ import annotations

from tests.support.models.published_configs import PUBLISHED_CONFIGS

_ALL = """architectures bos_token_id eos_token_id hidden_act hidden_size initializer_range intermediate_size
    max_position_embeddings model_type num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps
    tie_word_embeddings torch_dtype transformers_version use_cache vocab_size attention_dropout"""
_DEEPSEEK = f"""{_ALL} attention_bias auto_map aux_loss_alpha ep_size first_k_dense_replace kv_lora_rank
    moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok
    num_nextn_predict_layers pretraining_tp q_lora_rank qk_nope_head_dim qk_rope_head_dim quantization_config
    rope_scaling rope_theta routed_scaling_factor scoring_func seq_aux topk_group topk_method v_head_dim"""
_QWEN_2 = f"{_ALL} max_window_layers rope_theta sliding_window use_sliding_window"
_QWEN_3 = f"{_QWEN_2} attention_bias head_dim rope_scaling"
_QWEN_MOE = """decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
    output_router_logits router_aux_loss_coef"""
_QWEN_3_5 = f"""{_ALL} attention_bias attn_output_gate dtype full_attention_interval head_dim image_token_id layer_types
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings output_gate_type partial_rotary_factor
    rope_parameters text_config video_token_id vision_config vision_end_token_id vision_start_token_id"""
_VISION = "image_token_id text_config video_token_id vision_config vision_end_token_id vision_start_token_id"
PUBLISHED_KEYS: dict[str, tuple[str, str]] = {
    **{name: (config["architectures"][0], " ".join(config)) for name, config in PUBLISHED_CONFIGS.items()},
    "Llama-3.1-8B": ("LlamaForCausalLM", f"{_ALL} attention_bias mlp_bias pretraining_tp rope_scaling rope_theta"),
    "Qwen2.5-7B": ("Qwen2ForCausalLM", _QWEN_2),
    "Qwen3-8B": ("Qwen3ForCausalLM", _QWEN_3),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", f"{_QWEN_3} {_QWEN_MOE}"),
    "Qwen3-Next-80B-A3B": (
        "Qwen3NextForCausalLM",
        f"""{_ALL} {_QWEN_MOE} full_attention_interval head_dim linear_conv_kernel_dim linear_key_head_dim
        linear_num_key_heads linear_num_value_heads linear_value_head_dim partial_rotary_factor rope_scaling rope_theta
        shared_expert_intermediate_size use_sliding_window""",
    ),
    "Qwen3.6-27B": ("Qwen3_5ForConditionalGeneration", _QWEN_3_5),
    "Qwen3.6-35B-A3B": (
        "Qwen3_5MoeForConditionalGeneration",
        f"{_QWEN_3_5} moe_intermediate_size num_experts num_experts_per_tok router_aux_loss_coef "
        "shared_expert_intermediate_size",
    ),
    "Qwen2.5-VL-7B": ("Qwen2_5_VLForConditionalGeneration", f"{_QWEN_2} {_VISION} rope_scaling vision_token_id"),
    "Qwen3-VL-8B": (
        "Qwen3VLForConditionalGeneration",
        f"{_ALL} {_VISION} attention_bias head_dim rope_scaling rope_theta",
    ),
    "Mixtral-8x7B": (
        "MixtralForCausalLM",
        f"""{_ALL} num_experts_per_tok num_local_experts output_router_logits rope_theta router_aux_loss_coef
        sliding_window""",
    ),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", _DEEPSEEK),
    "DeepSeek-V3.2": ("DeepseekV32ForCausalLM", f"{_DEEPSEEK} index_head_dim index_n_heads index_topk"),
    "Kimi-K2.5": (
        "Kimi_K25ForConditionalGeneration",
        f"""{_DEEPSEEK} ignore_index media_placeholder_token_id pad_token_id text_config use_unified_vision_chunk
        video_placeholder vision_config""",
    ),
    "gpt-oss-20b": (
        "GptOssForCausalLM",
        f"""{_ALL} attention_bias experts_per_token head_dim initial_context_length layer_types num_experts_per_tok
        num_local_experts output_router_logits pad_token_id quantization_config rope_scaling rope_theta
        router_aux_loss_coef sliding_window swiglu_limit""",
    ),
    "gemma-3-1b": (
        "Gemma3ForCausalLM",
        f"""{_ALL} attention_bias attn_logit_softcapping cache_implementation final_logit_softcapping head_dim
        hidden_activation pad_token_id query_pre_attn_scalar rope_local_base_freq rope_scaling rope_theta sliding_window
        sliding_window_pattern""",
    ),
    "gemma-3-27b": (
        "Gemma3ForConditionalGeneration",
        f"""{_ALL} boi_token_index eoi_token_index head_dim image_token_index mm_tokens_per_image query_pre_attn_scalar
        rope_scaling sliding_window text_config vision_config""",
    ),
    "GLM-4.5-Air": (
        "Glm4MoeForCausalLM",
        f"""{_ALL} attention_bias first_k_dense_replace head_dim moe_intermediate_size n_group n_routed_experts
        n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers pad_token_id partial_rotary_factor
        rope_scaling rope_theta routed_scaling_factor topk_group use_qk_norm""",
    ),
    "Mistral-Small-3.1": (
        "Mistral3ForConditionalGeneration",
        f"""{_ALL} head_dim image_token_index multimodal_projector_bias projector_hidden_act rope_theta sliding_window
        spatial_merge_size text_config vision_config vision_feature_layer""",
    ),
}
