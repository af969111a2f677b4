"""What GGUF calls the parts of each architecture, and what config.json and Hugging Face's layout call them.

Sources: gguf-py, constants.py (`Keys`, `MODEL_TENSORS`); llama.cpp, conversion/base.py and its neighbours (what the
converter writes, and changes in tensors) and src/models (what is computed where a file says nothing).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from services.worker.weights.gguf_import.architecture import Architecture, Config, Key, alike, plain_sizes
from services.worker.weights.gguf_import.experts import Stack
from services.worker.weights.gguf_import.indexed_architectures import DEEPSEEK32, GLM_DSA
from services.worker.weights.gguf_import.layer_rules import (
    EXPERTS,
    HEAD_NORMS,
    KEYS,
    MLP,
    NORMS,
    POST_ATTENTION_NORMS,
    QKV_BIASES,
    QUERY_KEY,
    REORDERED_QUERY_KEY,
    VALUE_OUTPUT,
    offset_norm,
)
from services.worker.weights.gguf_import.metadata import Metadata, UnsupportedGgufError
from services.worker.weights.gguf_import.recurrent_architectures import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from services.worker.weights.gguf_import.routed_architectures import DEEPSEEK2, DEEPSEEK3, GLM4_MOE
from services.worker.weights.gguf_import.tensors import Sizes, Tensor

# Mistral's files have this architecture too.
_LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    alike(*NORMS, *REORDERED_QUERY_KEY, *VALUE_OUTPUT, *MLP),
    KEYS,
    {"attention_bias": False, "hidden_act": "silu", "mlp_bias": False},
)


def _complete_ministral3(metadata: Metadata, config: Config, _names: Collection[str]) -> None:
    config["rope_parameters"]["llama_4_scaling_beta"] = metadata.number("attention.temperature_scale")


_MINISTRAL3 = Architecture(
    "Ministral3ForCausalLM",
    "ministral3",
    _LLAMA.rules,
    KEYS,
    {"hidden_act": "silu", "sliding_window": None},
    extend=_complete_ministral3,
)
_QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    alike(*NORMS, *QUERY_KEY, *VALUE_OUTPUT, *QKV_BIASES, *MLP),
    KEYS,
    {"hidden_act": "silu", "use_sliding_window": False},
)
_QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    "qwen3",
    alike(*NORMS, *QUERY_KEY, *VALUE_OUTPUT, *HEAD_NORMS, *MLP),
    KEYS,
    {"attention_bias": False, "hidden_act": "silu", "use_sliding_window": False},
)
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


_QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    alike(*NORMS, *QUERY_KEY, *VALUE_OUTPUT, *HEAD_NORMS, *EXPERTS),
    {**KEYS, **_EXPERT_KEYS},
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


def _local_expert_sizes(config: Config) -> Sizes:
    return {**plain_sizes(config), "experts": config["num_local_experts"]}


_MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    alike(
        *NORMS,
        *REORDERED_QUERY_KEY,
        *VALUE_OUTPUT,
        Tensor("ffn_gate_inp.weight", "block_sparse_moe.gate.weight", "experts hidden"),
        Tensor("ffn_gate_exps.weight", "block_sparse_moe.experts.{}.w1.weight", "experts inner hidden"),
        Tensor("ffn_up_exps.weight", "block_sparse_moe.experts.{}.w3.weight", "experts inner hidden"),
        Tensor("ffn_down_exps.weight", "block_sparse_moe.experts.{}.w2.weight", "experts hidden inner"),
    ),
    {**KEYS, "num_local_experts": Key("expert_count"), "num_experts_per_tok": Key("expert_used_count")},
    {"hidden_act": "silu", "sliding_window": None},
    sizes=_local_expert_sizes,
)


def _complete_gpt_oss(metadata: Metadata, config: Config, _names: Collection[str]) -> None:
    # Written twice.
    metadata.size("feed_forward_length", default=1)
    if config["rope_parameters"]["rope_type"] == "yarn":
        # Not in the file: every model has it.
        config["rope_parameters"]["truncate"] = False
    config["layer_types"] = _layer_types(metadata, config, pattern=2)


_GPT_OSS = Architecture(
    "GptOssForCausalLM",
    "gpt_oss",
    alike(
        *POST_ATTENTION_NORMS,
        *QUERY_KEY,
        *VALUE_OUTPUT,
        *QKV_BIASES,
        Tensor("attn_output.bias", "self_attn.o_proj.bias", "hidden"),
        Tensor("attn_sinks.weight", "self_attn.sinks", "heads"),
        Tensor("ffn_gate_inp.weight", "mlp.router.weight", "experts hidden"),
        Tensor("ffn_gate_inp.bias", "mlp.router.bias", "experts"),
        Stack(("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.gate_up_proj", "experts inner hidden"),
        Stack(("ffn_down_exps",), "mlp.experts.down_proj", "experts hidden inner"),
    ),
    {
        **KEYS,
        "intermediate_size": Key("expert_feed_forward_length"),
        "num_local_experts": Key("expert_count"),
        "num_experts_per_tok": Key("expert_used_count"),
        "sliding_window": Key("attention.sliding_window"),
    },
    {"attention_bias": True, "hidden_act": "silu"},
    extend=_complete_gpt_oss,
    sizes=_local_expert_sizes,
)


def _layer_types(metadata: Metadata, config: Config, *, pattern: int) -> list[str]:
    """The types of layers, by number: every `pattern`-th has no window."""
    key = "attention.sliding_window_pattern"
    num_layers = config["num_hidden_layers"]
    flags = metadata.flags(key, num_layers) if metadata.is_list(key) else None
    if flags is None:
        pattern = metadata.size(key, default=pattern)
        flags = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in flags]


def _complete_gemma3(metadata: Metadata, config: Config, _names: Collection[str]) -> None:
    config["layer_types"] = _layer_types(metadata, config, pattern=6)
    theta = metadata.number("rope.freq_base_swa", default=10000.0)
    local = {"rope_type": "default", "rope_theta": theta}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    # llama.cpp tells the largest model, whose queries are scaled otherwise, by its number of layers.
    is_largest = config["num_hidden_layers"] == 62
    width = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    scale = metadata.number("attention.scale", default=width**-0.5)
    config["query_pre_attn_scalar"] = round(scale**-2)


_GEMMA3 = Architecture(
    "Gemma3ForCausalLM",
    "gemma3_text",
    alike(
        offset_norm("attn_norm.weight", "input_layernorm.weight"),
        offset_norm("post_attention_norm.weight", "post_attention_layernorm.weight"),
        offset_norm("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
        offset_norm("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
        offset_norm("attn_q_norm.weight", "self_attn.q_norm.weight", "head"),
        offset_norm("attn_k_norm.weight", "self_attn.k_norm.weight", "head"),
        *QUERY_KEY,
        *VALUE_OUTPUT,
        *MLP,
    ),
    {**KEYS, "sliding_window": Key("attention.sliding_window")},
    {"attention_bias": False, "hidden_activation": "gelu_pytorch_tanh"},
    extend=_complete_gemma3,
    norm=offset_norm("output_norm.weight", "model.norm.weight"),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "deepseek2": DEEPSEEK2,
    "deepseek32": DEEPSEEK32,
    "gemma3": _GEMMA3,
    "glm-dsa": GLM_DSA,
    "glm4moe": GLM4_MOE,
    "gpt-oss": _GPT_OSS,
    "llama": _LLAMA,
    "mistral3": _MINISTRAL3,
    "qwen2": _QWEN2,
    # The text of a multimodal model is imported, which is the model that it is made from.
    "qwen2vl": _QWEN2,
    "qwen3": _QWEN3,
    "qwen35": QWEN3_5,
    "qwen35moe": QWEN3_5_MOE,
    "qwen3moe": _QWEN3_MOE,
    "qwen3next": QWEN3_NEXT,
    "qwen3vl": _QWEN3,
    "qwen3vlmoe": _QWEN3_MOE,
}
"""Architectures by GGUF's name; see `architecture_of`."""

# What `expert_gating_func` says. Source: gguf-py, constants.py, `ExpertGatingFuncType`.
_SOFTMAX, _SIGMOID = 1, 2
_SCORE = "expert_gating_func"
# Architectures of which a file without the key has sigmoid.
_SIGMOID_BY_DEFAULT = frozenset({"deepseek32", "glm-dsa", "glm4moe"})
# How llama.cpp knows GLM-4.7-Flash, whose files lack the key: numbers of blocks, and of tokens.
_GLM_4_7_FLASH = ((47, 48), 154_880)


def architecture_of(metadata: Metadata, names: Collection[str], vocab_size: int) -> Architecture:
    """How the file's architecture is read.

    Args:
        names: The names of the file's tensors.
        vocab_size: The number of rows of its embedding.

    Raises:
        UnsupportedGgufError: it is not supported; the message says which are.
    """
    name = metadata.architecture
    if name not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedGgufError(
            f"has architecture {name!r}, which this release does not know, and a newer one may; supported: "
            f"{supported}; a family that runs transformers' code is served from a safetensors checkpoint alone"
        )
    if name == "llama" and metadata.count("expert_count", default=0):
        return _MIXTRAL
    if name == "mistral3" and "attention.temperature_scale" not in metadata:
        # Mistral Small 3.
        return _LLAMA
    if name == "deepseek2":
        return DEEPSEEK3 if _deepseek2_score(metadata, names, vocab_size) == _SIGMOID else DEEPSEEK2
    if name in _SIGMOID_BY_DEFAULT:
        _check_score(metadata.size(_SCORE, default=_SIGMOID), _SIGMOID)
    return ARCHITECTURES[name]


def _deepseek2_score(metadata: Metadata, names: Collection[str], vocab_size: int) -> int:
    """What turns a router's logits into weights, where the file says it, or its other values leave no doubt."""
    if _SCORE in metadata:
        return _check_score(metadata.size(_SCORE), _SOFTMAX, _SIGMOID)
    num_blocks, num_tokens = _GLM_4_7_FLASH
    is_flash = metadata.size("block_count") in num_blocks and vocab_size == num_tokens
    # Only scores by sigmoid are corrected.
    if is_flash or any(each.endswith(".exp_probs_b.bias") for each in names):
        return _SIGMOID
    if metadata.flag("expert_weights_norm", default=False):
        raise UnsupportedGgufError(
            f"lacks {_SCORE}: with expert_weights_norm, and without a correction bias (exp_probs_b), its experts may "
            "be weighed by softmax or by sigmoid"
        )
    return _SOFTMAX


def _check_score(score: int, *known: int) -> int:
    if score not in known:
        raise UnsupportedGgufError(f"has {_SCORE} {score}; supported here: {', '.join(map(str, known))}")
    return score
