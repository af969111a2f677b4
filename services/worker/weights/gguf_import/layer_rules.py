"""What many architectures have in common: keys of the configuration, and rules for the tensors of a layer."""

from __future__ import annotations

from collections.abc import Mapping

from services.worker.weights.gguf_import.architecture import Key, Rules
from services.worker.weights.gguf_import.tensors import Tensor

KEYS: Mapping[str, Key] = {
    "max_position_embeddings": Key("context_length"),
    "num_hidden_layers": Key("block_count"),
    "hidden_size": Key("embedding_length"),
    "intermediate_size": Key("feed_forward_length"),
    "num_attention_heads": Key("attention.head_count"),
    "rms_norm_eps": Key("attention.layer_norm_rms_epsilon", "number"),
}


def offset_norm(source: str, name: str, size: str = "hidden") -> Tensor:
    """A weight without the 1 that the model's norm adds, which GGUF has added."""
    return Tensor(source, name, size, offset=1.0)


def shared_expert(name: str) -> tuple[Tensor, ...]:
    """The matrices of the expert that every token takes, which are in the module `name`."""
    return (
        Tensor("ffn_gate_shexp.weight", f"{name}.gate_proj.weight", "shared_inner hidden"),
        Tensor("ffn_up_shexp.weight", f"{name}.up_proj.weight", "shared_inner hidden"),
        Tensor("ffn_down_shexp.weight", f"{name}.down_proj.weight", "hidden shared_inner"),
    )


NORMS: Rules = (
    Tensor("attn_norm.weight", "input_layernorm.weight", "hidden"),
    Tensor("ffn_norm.weight", "post_attention_layernorm.weight", "hidden"),
)
POST_ATTENTION_NORMS: Rules = (
    Tensor("attn_norm.weight", "input_layernorm.weight", "hidden"),
    Tensor("post_attention_norm.weight", "post_attention_layernorm.weight", "hidden"),
)
QUERY_KEY: Rules = (
    Tensor("attn_q.weight", "self_attn.q_proj.weight", "query hidden"),
    Tensor("attn_k.weight", "self_attn.k_proj.weight", "key_value hidden"),
)
REORDERED_QUERY_KEY: Rules = (
    Tensor("attn_q.weight", "self_attn.q_proj.weight", "query hidden", heads="heads"),
    Tensor("attn_k.weight", "self_attn.k_proj.weight", "key_value hidden", heads="key_value_heads"),
)
VALUE_OUTPUT: tuple[Tensor, ...] = (
    Tensor("attn_v.weight", "self_attn.v_proj.weight", "key_value hidden"),
    Tensor("attn_output.weight", "self_attn.o_proj.weight", "hidden query"),
)
QKV_BIASES: Rules = (
    Tensor("attn_q.bias", "self_attn.q_proj.bias", "query"),
    Tensor("attn_k.bias", "self_attn.k_proj.bias", "key_value"),
    Tensor("attn_v.bias", "self_attn.v_proj.bias", "key_value"),
)
HEAD_NORMS: Rules = (
    Tensor("attn_q_norm.weight", "self_attn.q_norm.weight", "head"),
    Tensor("attn_k_norm.weight", "self_attn.k_norm.weight", "head"),
)
MLP: tuple[Tensor, ...] = (
    Tensor("ffn_gate.weight", "mlp.gate_proj.weight", "inner hidden"),
    Tensor("ffn_up.weight", "mlp.up_proj.weight", "inner hidden"),
    Tensor("ffn_down.weight", "mlp.down_proj.weight", "hidden inner"),
)
EXPERTS: tuple[Tensor, ...] = (
    Tensor("ffn_gate_inp.weight", "mlp.gate.weight", "experts hidden"),
    Tensor("ffn_gate_exps.weight", "mlp.experts.{}.gate_proj.weight", "experts expert_inner hidden"),
    Tensor("ffn_up_exps.weight", "mlp.experts.{}.up_proj.weight", "experts expert_inner hidden"),
    Tensor("ffn_down_exps.weight", "mlp.experts.{}.down_proj.weight", "experts hidden expert_inner"),
)
