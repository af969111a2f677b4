"""What GGUF calls the parts of each architecture, and what config.json and Hugging Face's layout call them.

Sources: gguf-py, constants.py (`Keys`, `MODEL_TENSORS`); llama.cpp, convert_hf_to_gguf.py (what it changes in tensors),
and src/models (what it computes where a file says nothing).
"""

from __future__ import annotations

from collections.abc import Mapping

from services.worker.weights.gguf_import.architecture import Architecture, Config, Key, Rules, alike, plain_sizes
from services.worker.weights.gguf_import.tensors import Sizes, Tensor

_KEYS: Mapping[str, Key] = {
    "max_position_embeddings": Key("context_length"),
    "num_hidden_layers": Key("block_count"),
    "hidden_size": Key("embedding_length"),
    "intermediate_size": Key("feed_forward_length"),
    "num_attention_heads": Key("attention.head_count"),
    "rms_norm_eps": Key("attention.layer_norm_rms_epsilon", "number"),
}
_EXPERT_KEYS: Mapping[str, Key] = {
    "moe_intermediate_size": Key("expert_feed_forward_length"),
    "num_experts": Key("expert_count"),
    "num_experts_per_tok": Key("expert_used_count"),
}


def _expert_sizes(config: Config) -> Sizes:
    return {
        **plain_sizes(config),
        "experts": config["num_experts"],
        "expert_inner": config["moe_intermediate_size"],
    }


_NORMS: Rules = (
    Tensor("attn_norm.weight", "input_layernorm.weight", "hidden"),
    Tensor("ffn_norm.weight", "post_attention_layernorm.weight", "hidden"),
)
_QUERY_KEY: Rules = (
    Tensor("attn_q.weight", "self_attn.q_proj.weight", "query hidden"),
    Tensor("attn_k.weight", "self_attn.k_proj.weight", "key_value hidden"),
)
_REORDERED_QUERY_KEY: Rules = (
    Tensor("attn_q.weight", "self_attn.q_proj.weight", "query hidden", heads="heads"),
    Tensor("attn_k.weight", "self_attn.k_proj.weight", "key_value hidden", heads="key_value_heads"),
)
_VALUE_OUTPUT: Rules = (
    Tensor("attn_v.weight", "self_attn.v_proj.weight", "key_value hidden"),
    Tensor("attn_output.weight", "self_attn.o_proj.weight", "hidden query"),
)
_QKV_BIASES: Rules = (
    Tensor("attn_q.bias", "self_attn.q_proj.bias", "query"),
    Tensor("attn_k.bias", "self_attn.k_proj.bias", "key_value"),
    Tensor("attn_v.bias", "self_attn.v_proj.bias", "key_value"),
)
_HEAD_NORMS: Rules = (
    Tensor("attn_q_norm.weight", "self_attn.q_norm.weight", "head"),
    Tensor("attn_k_norm.weight", "self_attn.k_norm.weight", "head"),
)
_MLP: Rules = (
    Tensor("ffn_gate.weight", "mlp.gate_proj.weight", "inner hidden"),
    Tensor("ffn_up.weight", "mlp.up_proj.weight", "inner hidden"),
    Tensor("ffn_down.weight", "mlp.down_proj.weight", "hidden inner"),
)
_EXPERTS: Rules = (
    Tensor("ffn_gate_inp.weight", "mlp.gate.weight", "experts hidden"),
    Tensor("ffn_gate_exps.weight", "mlp.experts.{}.gate_proj.weight", "experts expert_inner hidden"),
    Tensor("ffn_up_exps.weight", "mlp.experts.{}.up_proj.weight", "experts expert_inner hidden"),
    Tensor("ffn_down_exps.weight", "mlp.experts.{}.down_proj.weight", "experts hidden expert_inner"),
)

# Mistral's files have this architecture too.
_LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    alike(*_NORMS, *_REORDERED_QUERY_KEY, *_VALUE_OUTPUT, *_MLP),
    _KEYS,
    {"attention_bias": False, "hidden_act": "silu", "mlp_bias": False},
)
_QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    alike(*_NORMS, *_QUERY_KEY, *_VALUE_OUTPUT, *_QKV_BIASES, *_MLP),
    _KEYS,
    {"hidden_act": "silu", "use_sliding_window": False},
)
_QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    alike(*_NORMS, *_QUERY_KEY, *_VALUE_OUTPUT, *_HEAD_NORMS, *_MLP),
    _KEYS,
    {"attention_bias": False, "hidden_act": "silu", "use_sliding_window": False},
)
_QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    alike(*_NORMS, *_QUERY_KEY, *_VALUE_OUTPUT, *_HEAD_NORMS, *_EXPERTS),
    {**_KEYS, **_EXPERT_KEYS},
    {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "mlp_only_layers": [],
        # llama.cpp computes it so for every model.
        "norm_topk_prob": True,
        "use_sliding_window": False,
    },
    sizes=_expert_sizes,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3moe": _QWEN3_MOE,
}
"""By GGUF's name."""
