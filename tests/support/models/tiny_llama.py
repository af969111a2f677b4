"""A small random Llama on disk in Hugging Face's layout, with a tokenizer, on which services start in tests.

Written without transformers, whose import takes seconds; the parity tests load it there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.tiny_tokenizer import IM_END_ID, IM_START_ID, write_tiny_tokenizer

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": IM_START_ID,
    "eos_token_id": IM_END_ID,
}


def write_tiny_llama(directory: Path, *, changes: Mapping[str, Any] | None = None, seed: int = 1) -> Path:
    """Write the model; returns `directory`.

    Args:
        directory: Created if missing.
        changes: Overrides of `TINY_CONFIG`.
        seed: Determines the weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {**TINY_CONFIG, **(changes or {})}
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generation = {"bos_token_id": IM_START_ID, "eos_token_id": IM_END_ID, "pad_token_id": IM_END_ID}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    save_file(tiny_weights(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    write_tiny_tokenizer(directory)
    return directory


def write_noisy_copy(model_dir: Path, directory: Path, *, noise: float = 0.003) -> Path:
    """Write a copy of a model with noise on its matrices, which mostly generates the same tokens; returns `directory`.

    Args:
        model_dir: A model written by `write_tiny_llama`.
        directory: Created if missing.
        noise: The standard deviation of the noise; that of the matrices is 0.2.
    """
    shutil.copytree(model_dir, directory, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(2)
    path = directory / "model.safetensors"
    weights = load_file(path)
    for tensor in weights.values():
        if tensor.dim() == 2:
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=noise)
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def tiny_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Random weights of the shapes in `config`, large enough that logits differ by whole units."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        is_norm = name.endswith("norm.weight")
        tensors[name] = 1 + 0.1 * values if is_norm else values * (0.2 if len(shape) == 2 else 0.1)
    return tensors


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocabulary, inner = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, out_features, in_features in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{prefix}.{name}.weight"] = (out_features, in_features)
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                shapes[f"{prefix}.{name}.bias"] = (out_features,)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes
