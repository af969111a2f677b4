"""Keys of config.json that change nothing in what a served model computes: why, and a value to try."""

from __future__ import annotations

_TRAINING = "for training"
_OTHER_HEADS = "for classifiers"
_OUTPUTS = "which outputs transformers' calls return"
_LOSS = "for the loss of training"

# By key: the reason, and a value that is not the default.
_COMMON: dict[str, tuple[str, object]] = {
    "_commit_hash": ("where the file came from", "0" * 40),
    "attention_dropout": (_TRAINING, 0.5),
    "attn_implementation": ("which of transformers' kernels compute", "eager"),
    "bos_token_id": ("the tokenizer's files say what begins a prompt", 3),
    "chunk_size_feed_forward": ("for encoders", 7),
    "dtype": ("the weights' type in memory; --dtype decides", "float32"),
    "experts_implementation": ("which of transformers' kernels compute", "eager"),
    "id2label": (_OTHER_HEADS, {"0": "a", "1": "b", "2": "c"}),
    "initializer_range": (_TRAINING, 0.5),
    "label2id": (_OTHER_HEADS, {"a": 0, "b": 1, "c": 2}),
    "name_or_path": ("where the file came from", "elsewhere"),
    "num_labels": (_OTHER_HEADS, 3),
    "output_attentions": (_OUTPUTS, False),
    "output_hidden_states": (_OUTPUTS, True),
    "pad_token_id": ("batches are not padded", 7),
    "problem_type": (_OTHER_HEADS, "regression"),
    "return_dict": (_OUTPUTS, True),
    "torch_dtype": ("an older name of dtype", "float32"),
    "transformers_version": ("which release wrote the file", "4.0.0"),
}
_ROUTED: dict[str, tuple[str, object]] = {"output_router_logits": (_OUTPUTS, False)}
_BALANCED: dict[str, tuple[str, object]] = {**_ROUTED, "router_aux_loss_coef": (_LOSS, 0.5)}
_LATENT: dict[str, tuple[str, object]] = {
    **_ROUTED,
    "head_dim": ("transformers sets it to qk_rope_head_dim", 32),
}
_PRETRAINED: dict[str, tuple[str, object]] = {"pretraining_tp": ("for bit-equality with training; not read today", 2)}
_BY_ARCHITECTURE: dict[str, dict[str, tuple[str, object]]] = {
    "LlamaForCausalLM": _PRETRAINED,
    "Qwen3MoeForCausalLM": _BALANCED,
    "Qwen3NextForCausalLM": _BALANCED,
    "Qwen3VLMoeForConditionalGeneration": _BALANCED,
    "Qwen3_5MoeForConditionalGeneration": _BALANCED,
    "MixtralForCausalLM": {**_BALANCED, "router_jitter_noise": (_TRAINING, 0.5)},
    "DeepseekV2ForCausalLM": {**_LATENT, **_PRETRAINED},
    "DeepseekV3ForCausalLM": {**_ROUTED, **_PRETRAINED},
    "Kimi_K25ForConditionalGeneration": {**_ROUTED, **_PRETRAINED},
    "DeepseekV32ForCausalLM": {**_LATENT, "mlp_bias": ("not read by the model", True)},
    "GptOssForCausalLM": _BALANCED,
    "Glm4MoeForCausalLM": _ROUTED,
    "Glm4MoeLiteForCausalLM": {**_ROUTED, **_PRETRAINED},
    "Glm4vMoeForConditionalGeneration": _BALANCED,
    "GlmMoeDsaForCausalLM": {
        **_LATENT,
        **_PRETRAINED,
        "ep_size": ("how training was split", 8),
        "mlp_bias": ("not read by the model", True),
    },
}

_OF_TOWERS = "for images, videos and sound, which are not served"
KEYS_OF_TOWERS: dict[str, str] = {
    "boi_token_id": _OF_TOWERS,
    "boi_token_index": _OF_TOWERS,
    "eoi_token_id": _OF_TOWERS,
    "eoi_token_index": _OF_TOWERS,
    "mm_tokens_per_image": _OF_TOWERS,
    "image_end_token_id": _OF_TOWERS,
    "image_start_token_id": _OF_TOWERS,
    "image_token_id": _OF_TOWERS,
    "image_token_index": _OF_TOWERS,
    "multimodal_projector_bias": _OF_TOWERS,
    "projection_hidden_size": _OF_TOWERS,
    "projection_layer_norm_eps": _OF_TOWERS,
    "projector_hidden_act": _OF_TOWERS,
    "spatial_merge_size": _OF_TOWERS,
    "video_end_token_id": _OF_TOWERS,
    "video_start_token_id": _OF_TOWERS,
    "video_token_id": _OF_TOWERS,
    "vision_config": _OF_TOWERS,
    "vision_end_token_id": _OF_TOWERS,
    "vision_feature_layer": _OF_TOWERS,
    "vision_start_token_id": _OF_TOWERS,
}
"""Keys beside `text_config`: why they change nothing in what is computed."""


def keys_without_effect(architecture: str) -> dict[str, tuple[str, object]]:
    """A family's keys, each with the reason and a value to try."""
    return _COMMON | _BY_ARCHITECTURE.get(architecture, {})
