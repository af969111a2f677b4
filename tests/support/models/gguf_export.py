"""Writes checkpoints as GGUF as llama.cpp's converter does. It shares nothing with the import that it tests.

Sources: llama.cpp, conversion/base.py, llama.py, qwen.py, deepseek.py, glm.py, gemma.py and gpt_oss.py; names are those
of the library's own map.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH as ARCH
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

from shared.model_files.model_dir import WEIGHTS
from tests.support.models.gguf_files import add_tokenizer, store
from tests.support.models.multimodal import text_of

Config = Mapping[str, Any]
Tensors = Iterator[tuple[str, Tensor]]

ARCHS = {
    "DeepseekV2ForCausalLM": ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": ARCH.DEEPSEEK2,
    "Gemma3ForCausalLM": ARCH.GEMMA3,
    "Glm4MoeForCausalLM": ARCH.GLM4_MOE,
    "GlmMoeDsaForCausalLM": ARCH.GLM_DSA,
    "GptOssForCausalLM": ARCH.GPT_OSS,
    "LlamaForCausalLM": ARCH.LLAMA,
    "Ministral3ForCausalLM": ARCH.MISTRAL3,
    "MixtralForCausalLM": ARCH.LLAMA,
    "Qwen2ForCausalLM": ARCH.QWEN2,
    "Qwen2_5_VLForConditionalGeneration": ARCH.QWEN2VL,
    "Qwen3ForCausalLM": ARCH.QWEN3,
    "Qwen3MoeForCausalLM": ARCH.QWEN3MOE,
    "Qwen3VLForConditionalGeneration": ARCH.QWEN3VL,
    "Qwen3NextForCausalLM": ARCH.QWEN3NEXT,
    "Qwen3_5ForConditionalGeneration": ARCH.QWEN35,
    "Qwen3_5MoeForConditionalGeneration": ARCH.QWEN35MOE,
}
_SCORES = {
    "DeepseekV2ForCausalLM": gguf.ExpertGatingFuncType.SOFTMAX,
    "DeepseekV3ForCausalLM": gguf.ExpertGatingFuncType.SIGMOID,
    "Glm4MoeForCausalLM": gguf.ExpertGatingFuncType.SIGMOID,
    "GlmMoeDsaForCausalLM": gguf.ExpertGatingFuncType.SIGMOID,
}
# The library's own map lacks these for some architectures.
_DRAFTS = {
    "eh_proj": gguf.MODEL_TENSOR.NEXTN_EH_PROJ,
    "enorm": gguf.MODEL_TENSOR.NEXTN_ENORM,
    "hnorm": gguf.MODEL_TENSOR.NEXTN_HNORM,
    "shared_head.norm": gguf.MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
}
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(\w+\.weight)")


def export_gguf(
    model_dir: Path,
    path: Path,
    *,
    divides_latents: bool = True,
    mixes_heads: bool = False,
    kind: Kind = Kind.F32,
    attention_kind: Kind = Kind.F32,
) -> None:
    """Write the checkpoint in `model_dir` into one file.

    Args:
        divides_latents: Whether the projection from latents is divided, as in files of 2025 and later.
        mixes_heads: Whether projections of Qwen3-Next are in one matrix, as in the first files of 2025.
        kind: The type of experts.
        attention_kind: The type of the matrices of attention, and of layers with the gated delta rule. All else is in
            float32.
    """
    whole_config = json.loads((model_dir / "config.json").read_text())
    name, config = whole_config["architectures"][0], text_of(whole_config)
    arch = ARCHS[name]
    tensors = _text_tensors(load_file(model_dir / WEIGHTS), config["num_hidden_layers"])
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    num_blocks = config["num_hidden_layers"] + sum(".eh_proj." in each for each in tensors)
    _add_parameters(writer, name, config, num_blocks, divides_latents=divides_latents)
    add_tokenizer(writer, "qwen2")
    names = gguf.get_tensor_name_map(arch, num_blocks)
    for each, tensor in _modified(
        *(name, config, _stacked(tensors)), divides_latents=divides_latents, mixes_heads=mixes_heads
    ):
        new_name = _draft_name(each) or names.get_name(each, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, each
        values = tensor.contiguous().float().numpy()
        is_projection = re.search(r"(attn_(q|k|v|output|qkv|gate)|ssm_(out|in))\.weight", new_name)
        its_kind = kind if "_exps.weight" in new_name else attention_kind if is_projection else Kind.F32
        if its_kind is not Kind.F32:
            writer.add_tensor(new_name, store(values, its_kind), raw_dtype=its_kind)
        else:
            writer.add_tensor(new_name, values)
    if config["rope_parameters"].get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_parameters(
    writer: gguf.GGUFWriter, name: str, config: Config, num_blocks: int, *, divides_latents: bool
) -> None:
    is_latent = "kv_lora_rank" in config
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(num_blocks)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if is_latent and divides_latents else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_rope(writer, config["rope_parameters"])
    if is_latent:
        _add_latent(writer, config, divides_latents=divides_latents)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if name == "Ministral3ForCausalLM":
        writer.add_rope_scaling_yarn_log_mul(config["rope_parameters"]["mscale_all_dim"])
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])
    if name in ("LlamaForCausalLM", "Ministral3ForCausalLM", "MixtralForCausalLM"):
        writer.add_rope_dimension_count(head_dim)
    if "index_topk" in config:
        _add_indexers(writer, config)
    if "linear_num_key_heads" in config:
        _add_recurrent(writer, config, num_blocks)
    if "partial_rotary_factor" in config["rope_parameters"]:
        writer.add_rope_dimension_count(int(head_dim * config["rope_parameters"]["partial_rotary_factor"]))
    if name in ("Gemma3ForCausalLM", "GptOssForCausalLM"):
        writer.add_sliding_window(config["sliding_window"])
    if name == "GptOssForCausalLM":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    _add_experts(writer, config)
    if name in _SCORES:
        _add_routing(writer, name, config, num_blocks)


def _add_experts(writer: gguf.GGUFWriter, config: Config) -> None:
    if experts := config.get("n_routed_experts", config.get("num_local_experts", config.get("num_experts"))):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _add_routing(writer: gguf.GGUFWriter, name: str, config: Config, num_blocks: int) -> None:
    writer.add_expert_gating_func(_SCORES[name])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(value=True)
    if config.get("n_group") is not None:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    # transformers does not save these layers, even though its configuration counts them.
    if num_drafts := num_blocks - config["num_hidden_layers"]:
        writer.add_nextn_predict_layers(num_drafts)


def _add_recurrent(writer: gguf.GGUFWriter, config: Config, num_blocks: int) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    is_recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    is_recurrent += [False] * (num_blocks - len(is_recurrent))
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", is_recurrent)
    # Written whatever the types of layers are.
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    if config["model_type"] != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if num_drafts := num_blocks - config["num_hidden_layers"]:
        writer.add_nextn_predict_layers(num_drafts)


def _add_indexers(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    has_indexer = [kind == "full" for kind in config["indexer_types"]]
    writer.add_array(f"{writer.arch}.attention.indexer.types", has_indexer)


def _add_latent(writer: gguf.GGUFWriter, config: Config, *, divides_latents: bool) -> None:
    plain, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    latent = config["kv_lora_rank"]
    if config.get("q_lora_rank") is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_rope_dimension_count(rope)
    writer.add_key_length(latent + rope if divides_latents else plain + rope)
    writer.add_value_length(latent if divides_latents else value)
    if divides_latents:
        writer.add_key_length_mla(plain + rope)
        writer.add_value_length_mla(value)


def _add_rope(writer: gguf.GGUFWriter, parameters: Config) -> None:
    if "sliding_attention" in parameters:
        writer.add_rope_freq_base_swa(parameters["sliding_attention"]["rope_theta"])
        parameters = parameters["full_attention"]
    writer.add_rope_freq_base(parameters["rope_theta"])
    kind = parameters["rope_type"]
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(parameters["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
        for key, add in (
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if key in parameters:
                add(parameters[key])
        if "mscale_all_dim" in parameters and "llama_4_scaling_beta" not in parameters:
            writer.add_rope_scaling_yarn_log_mul(0.1 * parameters["mscale_all_dim"])


def _llama3_factors(config: Config) -> np.ndarray[Any, Any]:
    parameters = config["rope_parameters"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    factors = []
    for frequency in 1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim):
        wavelength = 2 * torch.pi / float(frequency)
        smooth = (original / wavelength - low) / (high - low)
        is_short, is_long = wavelength < original / high, wavelength > original / low
        factors.append(1 if is_short else factor if is_long else 1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def _draft_name(name: str) -> str | None:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    tensor = _DRAFTS.get(match[2]) if match else None
    return f"{gguf.TENSOR_NAMES[tensor].format(bid=match[1])}.weight" if match and tensor is not None else None


def _text_tensors(tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The language model's, with layers that draft after the others."""
    names = {
        "mtp.fc.": "eh_proj.",
        "mtp.pre_fc_norm_embedding.": "enorm.",
        "mtp.pre_fc_norm_hidden.": "hnorm.",
        "mtp.norm.": "shared_head.norm.",
        "mtp.layers.0.": "",
    }
    found = {}
    for name, tensor in tensors.items():
        new_name = name.replace("language_model.", "")
        for start, part in names.items():
            if name.startswith(start):
                new_name = f"model.layers.{num_layers}.{part}{name.removeprefix(start)}"
        if "visual." not in name:
            found[new_name] = tensor
    return found


def _stacked(tensors: Mapping[str, Tensor]) -> Tensors:
    """Experts as one tensor."""
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            stacks.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
        else:
            yield name, tensor
    for name, experts in stacks.items():
        yield name, torch.stack([experts[number] for number in range(len(experts))])


def _modified(name: str, config: Config, tensors: Tensors, *, divides_latents: bool, mixes_heads: bool) -> Tensors:
    modify = _MODIFIERS.get(name, _unchanged)
    for each, tensor in tensors:
        if each.endswith("kv_b_proj.weight") and divides_latents:
            yield from _divided(each, tensor, config)
        elif "in_proj_qkvz" in each and mixes_heads:
            yield each, tensor
        else:
            yield from modify(each, tensor, config)


def _unchanged(name: str, tensor: Tensor, _config: Config) -> Tensors:
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def _permuted(name: str, tensor: Tensor, config: Config) -> Tensors:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    if match := re.search(r"\.([qk]_proj)\.weight$", name):
        num_heads = heads[match[1]]
        halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, tensor.shape[1])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    yield name, tensor


def _shifted(name: str, tensor: Tensor, _config: Config) -> Tensors:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def _divided(name: str, tensor: Tensor, config: Config) -> Tensors:
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    heads = tensor.view(config["num_attention_heads"], plain + value, tensor.shape[-1])
    keys, values = torch.split(heads, [plain, value], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def _gpt_oss(name: str, tensor: Tensor, _config: Config) -> Tensors:
    if name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif name.endswith("down_proj_bias"):
        yield name.replace("_bias", ".bias"), tensor
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", tensor.transpose(-1, -2)
    elif name.endswith("gate_up_proj_bias"):
        for part, values in (("gate", tensor[..., ::2]), ("up", tensor[..., 1::2])):
            yield name.replace("gate_up_proj_bias", f"{part}_proj.bias"), values
    elif name.endswith("gate_up_proj"):
        turned = tensor.transpose(-1, -2)
        for part, values in (("gate", turned[:, ::2]), ("up", turned[:, 1::2])):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), values
    else:
        yield name, tensor


def _recurrent(name: str, tensor: Tensor, config: Config) -> Tensors:
    if name.endswith("A_log"):
        yield name, -torch.exp(tensor)
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), tensor
    elif "conv1d" in name:
        yield name, tensor.squeeze()
    elif "in_proj_qkvz" in name:
        by_head = tensor.view(config["linear_num_key_heads"], -1, tensor.shape[-1])
        values = config["linear_num_value_heads"] // len(by_head) * config["linear_value_head_dim"]
        keys = config["linear_key_head_dim"]
        queries, keys, values, gates = torch.split(by_head, [keys, keys, values, values], dim=1)
        joined = torch.cat([part.flatten(0, 1) for part in (queries, keys, values)])
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), joined
        yield name.replace("in_proj_qkvz", "in_proj_z"), gates.flatten(0, 1)
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, tensor + 1
    else:
        yield name, tensor


def _tiled(name: str, tensor: Tensor, config: Config) -> Tensors:
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]

    def tile(values: Tensor, dim: int) -> Tensor:
        shape = list(values.shape)
        heads = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"], -1
        return values.reshape(*shape[:dim], *heads, *shape[dim + 1 :]).transpose(dim, dim + 1).reshape(shape)

    if re.search(r"linear_attn\.(in_proj_qkv|conv1d)\.", name):
        tensor = torch.cat([tensor[:keys], tile(tensor[keys:], 0)])
    elif re.search(r"linear_attn\.(in_proj_[zab]\.|A_log|dt_bias)", name):
        tensor = tile(tensor, 0)
    elif "linear_attn.out_proj" in name:
        tensor = tile(tensor, 1)
    elif name.endswith("shared_expert_gate.weight"):
        # As llama.cpp's quantiser leaves it.
        tensor = tensor.squeeze(0)
    yield from _recurrent(name, tensor, config)


_MODIFIERS: Mapping[str, Callable[[str, Tensor, Config], Tensors]] = {
    "LlamaForCausalLM": _permuted,
    "Ministral3ForCausalLM": _permuted,
    "MixtralForCausalLM": _permuted,
    "Gemma3ForCausalLM": _shifted,
    "GptOssForCausalLM": _gpt_oss,
    "Qwen3NextForCausalLM": _recurrent,
    "Qwen3_5ForConditionalGeneration": _tiled,
    "Qwen3_5MoeForConditionalGeneration": _tiled,
}
