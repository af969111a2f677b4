"""DeepSeek's and GLM's architectures: dense layers before mixtures of experts with shared ones, and layers that draft.

Sources: as of `architectures`; llama.cpp, conversion/deepseek.py and glm.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from services.worker.weights.gguf_import.architecture import (
    Architecture,
    Config,
    Key,
    Rules,
    partly_rotated,
    plain_sizes,
)
from services.worker.weights.gguf_import.latent import DividedProjection, latent_sizes, latent_widths
from services.worker.weights.gguf_import.layer_rules import (
    EXPERTS,
    HEAD_NORMS,
    KEYS,
    MLP,
    NORMS,
    POST_ATTENTION_NORMS,
    QKV_BIASES,
    QUERY_KEY,
    VALUE_OUTPUT,
    shared_expert,
)
from services.worker.weights.gguf_import.metadata import Metadata, UnsupportedGgufError
from services.worker.weights.gguf_import.tensors import Sizes, Tensor

# What DeepSeek's and GLM's mixtures have.
_ROUTED_KEYS: Mapping[str, Key] = {
    "first_k_dense_replace": Key("leading_dense_block_count", "count", 0),
    "moe_intermediate_size": Key("expert_feed_forward_length"),
    "n_group": Key("expert_group_count", "size", 1),
    "n_routed_experts": Key("expert_count"),
    "n_shared_experts": Key("expert_shared_count", "count", 0),
    "norm_topk_prob": Key("expert_weights_norm", "flag", False),
    "num_experts_per_tok": Key("expert_used_count"),
    "num_nextn_predict_layers": Key("nextn_predict_layers", "count", 0),
    "routed_scaling_factor": Key("expert_weights_scale", "number", 1.0),
    "topk_group": Key("expert_group_used_count", "size", 1),
}
_SHARED_EXPERT: Rules = shared_expert("mlp.shared_experts")
_CORRECTION = Tensor("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", "experts")
_DRAFTS: tuple[Tensor, ...] = (
    Tensor("nextn.eh_proj.weight", "eh_proj.weight", "hidden twice_hidden"),
    Tensor("nextn.enorm.weight", "enorm.weight", "hidden"),
    Tensor("nextn.hnorm.weight", "hnorm.weight", "hidden"),
    Tensor("nextn.embed_tokens.weight", "embed_tokens.weight", "vocab hidden"),
    Tensor("nextn.shared_head_head.weight", "shared_head.head.weight", "vocab hidden"),
    Tensor("nextn.shared_head_norm.weight", "shared_head.norm.weight", "hidden"),
)
_LATENT: Rules = (
    Tensor("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight", "cached hidden"),
    Tensor("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", "latent"),
    Tensor("attn_output.weight", "self_attn.o_proj.weight", "hidden attended"),
)
_QUERY_FROM_LATENT: Rules = (
    Tensor("attn_q_a.weight", "self_attn.q_a_proj.weight", "query_latent hidden"),
    Tensor("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", "query_latent"),
    Tensor("attn_q_b.weight", "self_attn.q_b_proj.weight", "query query_latent"),
)
_QUERY = Tensor("attn_q.weight", "self_attn.q_proj.weight", "query hidden")
_FROM_LATENT = "self_attn.kv_b_proj.weight"


def _routed_sizes(sizes: Sizes, config: Config) -> Sizes:
    return {
        **sizes,
        "experts": config["n_routed_experts"],
        "expert_inner": config["moe_intermediate_size"],
        "shared_inner": config["n_shared_experts"] * config["moe_intermediate_size"],
        "twice_hidden": 2 * config["hidden_size"],
    }


def _feed_forward(config: Config, layer: int, names: frozenset[str]) -> Rules:
    """The rules of a layer's network, and of what is around a layer that drafts."""
    if layer < config["first_k_dense_replace"]:
        return MLP
    # Files may lack the copies of the model's embedding and head.
    drafts = tuple(rule for rule in _DRAFTS if layer >= config["num_hidden_layers"] and _is_stored(rule, names))
    has_correction = config.get("topk_method", "noaux_tc") == "noaux_tc"
    return (
        *EXPERTS,
        *((_CORRECTION,) if has_correction else ()),
        *(_SHARED_EXPERT if config["n_shared_experts"] else ()),
        *drafts,
    )


def _is_stored(rule: Tensor, names: frozenset[str]) -> bool:
    is_copy = rule.name.startswith(("embed_tokens.", "shared_head.head."))
    return not is_copy or rule.source in names


def _deepseek_rules(config: Config, layer: int, names: frozenset[str]) -> Rules:
    return (
        *NORMS,
        *_LATENT,
        *(_QUERY_FROM_LATENT if config["q_lora_rank"] else (_QUERY,)),
        Tensor("attn_kv_b.weight", _FROM_LATENT, "from_latent latent")
        if "attn_kv_b.weight" in names
        else DividedProjection(_FROM_LATENT),
        *_feed_forward(config, layer, names),
    )


def set_drafts_apart(_metadata: Metadata, config: Config, _names: Collection[str]) -> None:
    """Count the last blocks, which draft, apart from the model's layers. See `Architecture.extend`."""
    config["num_hidden_layers"] -= config["num_nextn_predict_layers"]
    if config["num_hidden_layers"] < 1:
        raise UnsupportedGgufError(f"has nextn_predict_layers {config['num_nextn_predict_layers']}, as many as layers")


def _complete_deepseek2(metadata: Metadata, config: Config, names: Collection[str]) -> None:
    set_drafts_apart(metadata, config, names)
    config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    # transformers has no such step, and no published model of this version has it.
    if config["norm_topk_prob"]:
        raise UnsupportedGgufError("has expert_weights_norm beside expert_gating_func 1, which is not supported")


DEEPSEEK3 = Architecture(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    _deepseek_rules,
    {**KEYS, **_ROUTED_KEYS},
    {"attention_bias": False, "hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    widths=latent_widths,
    extend=set_drafts_apart,
    sizes=lambda config: _routed_sizes(latent_sizes(config), config),
)
DEEPSEEK2 = Architecture(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    _deepseek_rules,
    {**KEYS, **_ROUTED_KEYS},
    {"attention_bias": False, "hidden_act": "silu", "mlp_bias": False, "scoring_func": "softmax"},
    widths=latent_widths,
    extend=_complete_deepseek2,
    sizes=lambda config: _routed_sizes(latent_sizes(config), config),
)


def _glm4_moe_rules(config: Config, layer: int, names: frozenset[str]) -> Rules:
    return (
        *POST_ATTENTION_NORMS,
        *QUERY_KEY,
        *VALUE_OUTPUT,
        *(QKV_BIASES if config["attention_bias"] else ()),
        *(HEAD_NORMS if config["use_qk_norm"] else ()),
        *_feed_forward(config, layer, names),
    )


GLM4_MOE = Architecture(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    _glm4_moe_rules,
    {**KEYS, **_ROUTED_KEYS},
    {"hidden_act": "silu"},
    widths=partly_rotated,
    extend=set_drafts_apart,
    sizes=lambda config: _routed_sizes(plain_sizes(config), config),
    flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
)
