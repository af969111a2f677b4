"""Small GGUF files as llama.cpp's converter writes them, of several architectures, plain and quantised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from services.worker.ops.block_types import BLOCK_TYPES, BlockType
from services.worker.weights.dummy_parts import write_block_scales
from tests.support.models.tiny_llama import TINY_CONFIG
from tests.support.models.tiny_tokenizer import CHATML, tiny_tokenizer

# Row lengths are multiples of 32, the block of Q8_0 and Q4_0; head_dim differs from hidden_size / num_heads.
CONFIG: dict[str, Any] = {
    **TINY_CONFIG,
    "vocab_size": 420,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_EXPERT_NAMES = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def model_tensors(architecture: str, config: Mapping[str, Any] = CONFIG, seed: int = 5) -> dict[str, Tensor]:
    """Random weights under Hugging Face's names, for an architecture by its GGUF name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.1 * torch.randn(shape, generator=generator) for name, shape in _shapes(architecture, config).items()
    }


def write_gguf(
    path: Path,
    architecture: str,
    *,
    config: Mapping[str, Any] = CONFIG,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre_tokenizer: str = "qwen2",
    more: Mapping[str, Any] | None = None,
    tensors_per_file: int = 0,
) -> dict[str, Tensor]:
    """Write a model of `model_tensors`.

    Args:
        architecture: llama, qwen2, qwen3 or qwen3moe.
        config: The model's sizes, under Hugging Face's names.
        kind: The type of matrices; all other tensors are float32.
        pre_tokenizer: The pre-tokenizer's name in the file.
        more: Further metadata (prefixed with the architecture unless it is general) and tensors, under GGUF names.
        tensors_per_file: The model is split into files of so many, `NAME-00001-of-0000N.gguf`; 0 means that it is not.

    Returns:
        The values stored in the file, under Hugging Face's names.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    _add_sizes(writer, architecture, config)
    add_tokenizer(writer, pre_tokenizer)
    values = {}
    stacks: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, tensor in model_tensors(architecture, config).items():
        is_float = tensor.dim() < 2 or kind is gguf.GGMLQuantizationType.F32
        stored = tensor.numpy() if is_float else store(tensor.numpy(), kind)
        values[name] = tensor if is_float else torch.from_numpy(gguf.quants.dequantize(stored, kind).copy())
        if ".experts." in name:
            layer, _, part = name.removeprefix("model.layers.").split(".", 2)
            stacks.setdefault(f"blk.{layer}.{_EXPERT_NAMES[part.split('.')[-2]]}.weight", []).append(stored)
        else:
            _add_tensor(writer, _gguf_name(name), _gguf_rows(architecture, name, stored, config), kind)
    for name, experts in stacks.items():
        _add_tensor(writer, name, np.stack(experts), kind)
    for key, value in (more or {}).items():
        _add_more(writer, architecture, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _shapes(architecture: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        attention = {
            "q_proj": (query, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, query),
        }
        shapes.update({f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()})
        if architecture == "qwen2":
            shapes.update({f"{prefix}.self_attn.{n}.bias": attention[n][:1] for n in ("q_proj", "k_proj", "v_proj")})
        if architecture.startswith("qwen3"):
            shapes.update({f"{prefix}.self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")})
        mlps = [f"{prefix}.mlp"]
        if architecture == "qwen3moe":
            shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
            inner = config["moe_intermediate_size"]
            mlps = [f"{prefix}.mlp.experts.{expert}" for expert in range(config["num_experts"])]
        for mlp in mlps:
            shapes.update({f"{mlp}.gate_proj.weight": (inner, hidden), f"{mlp}.up_proj.weight": (inner, hidden)})
            shapes[f"{mlp}.down_proj.weight"] = (hidden, inner)
        shapes.update({f"{prefix}.{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")})
    return {**shapes, "model.norm.weight": (hidden,)}


def _gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        part, suffix = part.rsplit(".", 1)
        return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix}"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def _gguf_rows(
    architecture: str, name: str, stored: np.ndarray[Any, Any], config: Mapping[str, Any]
) -> np.ndarray[Any, Any]:
    """Reorder rows: a llama's rotated pairs are adjacent in GGUF, but half a head apart in Hugging Face's layout."""
    if architecture != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return stored
    heads = stored.reshape(-1, 2, config["head_dim"] // 2, stored.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(stored.shape)


def store(values: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """The blocks of a matrix of float32; those of a type that the library only reads have other values."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return _random_blocks(values, BLOCK_TYPES[kind.name])


def _random_blocks(values: np.ndarray[Any, Any], block_type: BlockType) -> np.ndarray[Any, Any]:
    """Any codes and small scales, the same for the same values."""
    generator = torch.Generator().manual_seed(int(np.abs(values).sum() * 1000))
    blocks = values.shape[0], values.shape[1] // block_type.num_values, block_type.num_bytes
    stored = torch.randint(0, 256, blocks, generator=generator, dtype=torch.uint8)
    write_block_scales(stored, block_type, 0.01)
    return stored.flatten(1).numpy()


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, stored: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType
) -> None:
    writer.add_tensor(name, stored, raw_dtype=None if stored.dtype == np.float32 else kind)


def _add_more(writer: gguf.GGUFWriter, architecture: str, key: str, value: Any) -> None:
    name = key if key.startswith("general.") else f"{architecture}.{key}"
    if isinstance(value, Tensor):
        writer.add_tensor(key, value.numpy())
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_uint32(name, value)


def _add_sizes(writer: gguf.GGUFWriter, architecture: str, config: Mapping[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config["vocab_size"])
    if architecture == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
    if architecture == "qwen3moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_tokenizer(writer: gguf.GGUFWriter, pre_tokenizer: str) -> None:
    """Add the tiny tokenizer, under a name of a pre-tokenizer."""
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHATML)
