"""What is known of config.json's keys that a family does not read: why each changes nothing in what is computed.

What is read is recorded while a model loads (`RecordedConfig`), so that no list has it. All other keys are named in the
log: a newer release may know them.
"""

from __future__ import annotations

from services.worker.recorded_config import RecordedConfig
from shared.model_files.implementations import Implementation
from shared.model_files.model_dir import architecture_of, is_multimodal

_TRAINING = "for training"
_OTHER_HEADS = "for classifiers"
_OUTPUTS = "which outputs transformers' calls return"
_LOSS = "for the loss of training"
_IF_DRAFTS = "checked where layers that draft are loaded"

# The reason by key.
_COMMON: dict[str, str] = {
    "_commit_hash": "where the file came from",
    "attention_dropout": _TRAINING,
    "attn_implementation": "which of transformers' kernels compute",
    "bos_token_id": "the tokenizer's files say what begins a prompt",
    "chunk_size_feed_forward": "for encoders",
    "dtype": "the weights' type in memory; --dtype decides",
    "experts_implementation": "which of transformers' kernels compute",
    "id2label": _OTHER_HEADS,
    "initializer_range": _TRAINING,
    "label2id": _OTHER_HEADS,
    "name_or_path": "where the file came from",
    "num_labels": _OTHER_HEADS,
    "output_attentions": _OUTPUTS,
    "output_hidden_states": _OUTPUTS,
    "pad_token_id": "batches are not padded",
    "problem_type": _OTHER_HEADS,
    "return_dict": _OUTPUTS,
    "torch_dtype": "an older name of dtype",
    "transformers_version": "which release wrote the file",
}
_ROUTED: dict[str, str] = {"output_router_logits": _OUTPUTS}
_BALANCED: dict[str, str] = {**_ROUTED, "router_aux_loss_coef": _LOSS}
_LATENT: dict[str, str] = {
    **_ROUTED,
    "head_dim": "transformers sets it to qk_rope_head_dim",
}
_DEEPSEEK: dict[str, str] = {"aux_loss_alpha": _LOSS, "ep_size": "how training was split", "seq_aux": _LOSS}
_RECURRENT: dict[str, str] = {
    "mamba_ssm_dtype": "the type of states, which are float32 here",
    "mtp_num_hidden_layers": _IF_DRAFTS,
    "mtp_use_dedicated_embeddings": _IF_DRAFTS,
}
_PRETRAINED: dict[str, str] = {"pretraining_tp": "for bit-equality with training; not read today"}
_BY_ARCHITECTURE: dict[str, dict[str, str]] = {
    "LlamaForCausalLM": _PRETRAINED,
    "Qwen3MoeForCausalLM": {**_BALANCED, "max_window_layers": "not read by the model"},
    "Qwen3NextForCausalLM": {**_BALANCED, "use_sliding_window": "not read by the model"},
    "Qwen3VLMoeForConditionalGeneration": _BALANCED,
    "Qwen3_5ForConditionalGeneration": _RECURRENT,
    "Qwen3_5MoeForConditionalGeneration": {**_BALANCED, **_RECURRENT, "intermediate_size": "no layer is dense"},
    "MixtralForCausalLM": {**_BALANCED, "router_jitter_noise": _TRAINING},
    "DeepseekV2ForCausalLM": {
        **_LATENT,
        **_PRETRAINED,
        **_DEEPSEEK,
        "qk_head_dim": "the sum of qk_nope_head_dim and qk_rope_head_dim, which are read",
    },
    "DeepseekV3ForCausalLM": {**_ROUTED, **_PRETRAINED, **_DEEPSEEK},
    "Kimi_K25ForConditionalGeneration": {**_ROUTED, **_PRETRAINED, **_DEEPSEEK},
    "DeepseekV32ForCausalLM": {**_LATENT, **_PRETRAINED, **_DEEPSEEK, "mlp_bias": "not read by the model"},
    "GptOssForCausalLM": {
        **_BALANCED,
        "experts_per_token": "num_experts_per_tok says the same",
        "initial_context_length": "the scaling of positions says the same",
    },
    "Glm4MoeForCausalLM": _ROUTED,
    "Glm4MoeLiteForCausalLM": {**_ROUTED, **_PRETRAINED},
    "Glm4vMoeForConditionalGeneration": _BALANCED,
    "GlmMoeDsaForCausalLM": {
        **_LATENT,
        **_PRETRAINED,
        "ep_size": "how training was split",
        "mlp_bias": "not read by the model",
    },
}

_OF_TOWERS = "for images, videos and sound, which are not served"
KEYS_OF_TOWERS: dict[str, str] = {
    "boi_token_id": _OF_TOWERS,
    "boi_token_index": _OF_TOWERS,
    "eoi_token_id": _OF_TOWERS,
    "eoi_token_index": _OF_TOWERS,
    "mm_tokens_per_image": _OF_TOWERS,
    "ignore_index": _LOSS,
    "image_end_token_id": _OF_TOWERS,
    "image_start_token_id": _OF_TOWERS,
    "image_token_id": _OF_TOWERS,
    "image_token_index": _OF_TOWERS,
    "media_placeholder_token_id": _OF_TOWERS,
    "multimodal_projector_bias": _OF_TOWERS,
    "projection_hidden_size": _OF_TOWERS,
    "projection_layer_norm_eps": _OF_TOWERS,
    "projector_hidden_act": _OF_TOWERS,
    "spatial_merge_size": _OF_TOWERS,
    "use_unified_vision_chunk": _OF_TOWERS,
    "video_end_token_id": _OF_TOWERS,
    "video_placeholder": _OF_TOWERS,
    "video_start_token_id": _OF_TOWERS,
    "video_token_id": _OF_TOWERS,
    "vision_config": _OF_TOWERS,
    "vision_end_token_id": _OF_TOWERS,
    "vision_feature_layer": _OF_TOWERS,
    "vision_start_token_id": _OF_TOWERS,
    "vision_token_id": _OF_TOWERS,
}
"""Keys beside `text_config`: why they change nothing in what is computed."""

_GENERATION = "for transformers' generate(); generation_config.json has a model's defaults of sampling"
_OLDER = "written by older releases of transformers for encoders, decoders beside them, and other frameworks"
_ELSEWHERE = "read where files are recognised, or by the tokenizer service"
# The reason by key. Unlike `_COMMON`'s, transformers' models are not built with another value of these.
_OF_ALL_FILES: dict[str, str] = {
    **dict.fromkeys(
        (
            *("assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens"),
            *("diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
            *("encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
            *("forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens"),
            *("min_length", "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"),
            *("num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values"),
            *("repetition_penalty", "return_dict_in_generate", "suppress_tokens", "target_lookbehind", "temperature"),
            *("cache_implementation", "top_k", "top_p", "typical_p", "use_cache"),
        ),
        _GENERATION,
    ),
    **dict.fromkeys(
        (
            *("add_cross_attention", "cross_attention_hidden_size", "decoder_start_token_id", "finetuning_task"),
            *("is_decoder", "prefix", "pruned_heads", "sep_token_id", "task_specific_params", "tf_legacy_loss"),
            *("tie_encoder_decoder", "tokenizer_class", "torchscript", "use_bfloat16"),
        ),
        _OLDER,
    ),
    **dict.fromkeys(("architectures", "eos_token_id", "model_type", "vocab_size"), _ELSEWHERE),
    **dict.fromkeys(("quantization_config", "compression_config"), "the formats of weights"),
    "auto_map": "code beside the model, which is never run",
    "name_or_path": "where the file came from",
}
_BY_WEIGHTS = "read where other keys say that there are such layers"
_OTHER_KEY = "another key says the same"
_NO_GROUPS = "read where experts are in groups"
_NO_WINDOW = "read where a window is switched on"
# The reason by family and key: what is read only beside some values of other keys, and has no effect beside all others.
_BESIDE_OTHERS: dict[str, dict[str, str]] = {
    "DeepseekV2ForCausalLM": {"intermediate_size": _BY_WEIGHTS, "n_group": _NO_GROUPS, "topk_group": _NO_GROUPS},
    "DeepseekV3ForCausalLM": {"intermediate_size": _BY_WEIGHTS, "topk_group": _NO_GROUPS},
    "DeepseekV32ForCausalLM": {"first_k_dense_replace": _OTHER_KEY, "topk_group": _NO_GROUPS},
    "Gemma3ForCausalLM": {"rope_local_base_freq": _OTHER_KEY},
    "Glm4MoeForCausalLM": {"intermediate_size": _BY_WEIGHTS, "topk_group": _NO_GROUPS},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": _OTHER_KEY, "topk_group": _NO_GROUPS},
    "Glm4vMoeForConditionalGeneration": {"intermediate_size": _BY_WEIGHTS, "topk_group": _NO_GROUPS},
    "GlmMoeDsaForCausalLM": {
        "first_k_dense_replace": _OTHER_KEY,
        "index_skip_topk_offset": _OTHER_KEY,
        "index_topk_freq": _OTHER_KEY,
        "index_topk_pattern": _OTHER_KEY,
        "topk_group": _NO_GROUPS,
    },
    "Kimi_K25ForConditionalGeneration": {"intermediate_size": _BY_WEIGHTS, "topk_group": _NO_GROUPS},
    "Qwen2ForCausalLM": {"sliding_window": _NO_WINDOW},
    "Qwen2VLForConditionalGeneration": {"sliding_window": _NO_WINDOW},
    "Qwen2_5_VLForConditionalGeneration": {"sliding_window": _NO_WINDOW},
    "Qwen3ForCausalLM": {"sliding_window": _NO_WINDOW},
    "Qwen3MoeForCausalLM": {"intermediate_size": _BY_WEIGHTS, "sliding_window": _NO_WINDOW},
    "Qwen3NextForCausalLM": {"full_attention_interval": _OTHER_KEY, "intermediate_size": _BY_WEIGHTS},
    "Qwen3VLMoeForConditionalGeneration": {"intermediate_size": _BY_WEIGHTS},
    "Qwen3_5ForConditionalGeneration": {"full_attention_interval": _OTHER_KEY},
    "Qwen3_5MoeForConditionalGeneration": {"full_attention_interval": _OTHER_KEY},
}
_QUANTISATION = ("quantization_config", "compression_config")
_ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
# In them.
_OF_ROPE: dict[str, str] = {
    "finetuned": "how the model was trained",
    "full_attention": "read where a layer is of this type",
    "sliding_attention": "read where a layer is of this type",
}
# Architectures of the same model, by the name under which the lists have it.
_SAME_AS: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
}


def keys_without_effect(architecture: str) -> dict[str, str]:
    """A family's keys that it never reads, each with the reason why that changes nothing."""
    return _COMMON | _BY_ARCHITECTURE.get(_SAME_AS.get(architecture, architecture), {})


def keys_beside_others(architecture: str) -> dict[str, str]:
    """A family's keys that it does not always read, each with the reason."""
    return _BESIDE_OTHERS.get(_SAME_AS.get(architecture, architecture), {})


def unknown_keys(config: RecordedConfig, implementation: Implementation) -> list[str]:
    """The keys of a loaded model that were not read, and of which nothing is known, sorted; those inside objects are
    paths with dots. `QuantizationConfig` knows those of the formats of weights.

    With transformers' code, those that its configuration does not have.

    A null is what transformers writes for a value that is absent. Names that begin with `_` are its own.
    """
    known = {*_COMMON, *_OF_ALL_FILES}
    if implementation == "lockstep":
        architecture = architecture_of(config)
        known |= {*keys_without_effect(architecture), *keys_beside_others(architecture)}
    known |= {f"{name}.{key}" for name in _ROPE_OBJECTS for key in _OF_ROPE}
    if is_multimodal(config):
        known |= KEYS_OF_TOWERS.keys()
    unread = (path for path in config.unread() if not path.startswith("_"))
    return sorted(path for path in unread if path not in known and path.partition(".")[0] not in _QUANTISATION)
