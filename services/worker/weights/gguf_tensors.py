"""The tensors of GGUF files: which an architecture has, and what they become in Hugging Face's layout.

Names of GGUF follow "Standardized tensor names" in ggml's docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, ReaderTensor, dequantize
from torch import Tensor

from services.worker.weights.quantization.gguf_blocks import BLOCK_TYPES, SUFFIX, BlockType


class UnexpectedTensorsError(Exception):
    """Tensors are missing, unexpected or of the wrong shape; the message names them."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What a tensor is called in Hugging Face's layout, and its shape there."""

    name: str
    """Without a suffix; a stack's has `{}` for the expert's number."""
    shape: tuple[int, ...]
    num_rotated_heads: int = 0
    """Heads whose rows GGUF reorders: a llama's rotated pairs are adjacent there, but half a head apart here."""


def convert_tensors(
    tensors: list[ReaderTensor], architecture: str, config: Any, *, keeps_blocks: bool
) -> tuple[dict[str, Tensor], dict[str, BlockType]]:
    """All tensors, in Hugging Face's names and order of rows, and the types of those that are blocks, by layer.

    Args:
        architecture: GGUF's name.
        config: transformers' configuration of the model.
        keeps_blocks: Whether matrices in blocks keep them (see `gguf_blocks`); everything else becomes float32.

    Raises:
        UnexpectedTensorsError: the tensors are not those that the configuration needs.
    """
    places = _places(architecture, config)
    _check(tensors, places)
    values: dict[str, Tensor] = {}
    layer_to_type: dict[str, BlockType] = {}
    for tensor in tensors:
        block_type = BLOCK_TYPES.get(tensor.tensor_type.name) if keeps_blocks else None
        for name, value in _convert(tensor, places[tensor.name], block_type):
            values[name] = value
            if block_type is not None and name.endswith(SUFFIX):
                layer_to_type[name.removesuffix(SUFFIX)] = block_type
    return values, layer_to_type


def _places(architecture: str, config: Any) -> Mapping[str, _Place]:
    """By GGUF's names."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    places = {
        "token_embd.weight": _Place("model.embed_tokens", (vocabulary, hidden)),
        "output_norm.weight": _Place("model.norm", (hidden,)),
    }
    if not config.tie_word_embeddings:
        places["output.weight"] = _Place("lm_head", (vocabulary, hidden))
    for layer in range(config.num_hidden_layers):
        parts = {**_attention(architecture, config), **_feed_forward(architecture, config)}
        for part, place in parts.items():
            name = f"model.layers.{layer}.{place.name}"
            places[f"blk.{layer}.{part}"] = _Place(name, place.shape, place.num_rotated_heads)
    return places


def _attention(architecture: str, config: Any) -> dict[str, _Place]:
    hidden, width = config.hidden_size, config.head_dim
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    query, key_value = num_heads * width, num_kv_heads * width
    is_reordered = architecture == "llama"
    parts = {
        "attn_norm.weight": _Place("input_layernorm", (hidden,)),
        "attn_q.weight": _Place("self_attn.q_proj", (query, hidden), num_heads if is_reordered else 0),
        "attn_k.weight": _Place("self_attn.k_proj", (key_value, hidden), num_kv_heads if is_reordered else 0),
        "attn_v.weight": _Place("self_attn.v_proj", (key_value, hidden)),
        "attn_output.weight": _Place("self_attn.o_proj", (hidden, query)),
    }
    if architecture == "qwen2":
        sizes = {"q": query, "k": key_value, "v": key_value}
        parts |= {f"attn_{part}.bias": _Place(f"self_attn.{part}_proj", (size,)) for part, size in sizes.items()}
    if architecture.startswith("qwen3"):
        parts |= {f"attn_{part}_norm.weight": _Place(f"self_attn.{part}_norm", (width,)) for part in ("q", "k")}
    return parts


def _feed_forward(architecture: str, config: Any) -> dict[str, _Place]:
    hidden = config.hidden_size
    norm = {"ffn_norm.weight": _Place("post_attention_layernorm", (hidden,))}
    if architecture != "qwen3moe":
        inner = config.intermediate_size
        return {
            **norm,
            "ffn_gate.weight": _Place("mlp.gate_proj", (inner, hidden)),
            "ffn_up.weight": _Place("mlp.up_proj", (inner, hidden)),
            "ffn_down.weight": _Place("mlp.down_proj", (hidden, inner)),
        }
    num_experts, inner = config.num_experts, config.moe_intermediate_size
    return {
        **norm,
        "ffn_gate_inp.weight": _Place("mlp.gate", (num_experts, hidden)),
        "ffn_gate_exps.weight": _Place("mlp.experts.{}.gate_proj", (num_experts, inner, hidden)),
        "ffn_up_exps.weight": _Place("mlp.experts.{}.up_proj", (num_experts, inner, hidden)),
        "ffn_down_exps.weight": _Place("mlp.experts.{}.down_proj", (num_experts, hidden, inner)),
    }


def _check(tensors: list[ReaderTensor], places: Mapping[str, _Place]) -> None:
    """Raise `UnexpectedTensorsError` unless the tensors are those of `places`."""
    names = {tensor.name for tensor in tensors}
    if missing := places.keys() - names:
        raise UnexpectedTensorsError(f"lacks tensors: {', '.join(sorted(missing))}")
    if unexpected := names - places.keys():
        raise UnexpectedTensorsError(f"has unexpected tensors: {', '.join(sorted(unexpected))}")
    for tensor in tensors:
        # GGUF lists the fastest dimension first.
        shape, expected = tuple(tensor.shape.tolist()[::-1]), places[tensor.name].shape
        if shape != expected:
            raise UnexpectedTensorsError(f"has {tensor.name} of shape {list(shape)}, not {list(expected)}")


def _convert(tensor: ReaderTensor, place: _Place, block_type: BlockType | None) -> Iterator[tuple[str, Tensor]]:
    if len(place.shape) == 3:
        for number, matrix in enumerate(tensor.data):
            yield _stored(place.name.format(number), matrix, tensor.tensor_type, block_type)
    elif len(place.shape) == 2:
        rows = _in_order(tensor.data, place.num_rotated_heads)
        yield _stored(place.name, rows, tensor.tensor_type, block_type)
    else:
        values = dequantize(tensor.data, tensor.tensor_type)
        yield f"{place.name}.{tensor.name.rsplit('.', 1)[1]}", torch.from_numpy(values.copy())


def _in_order(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """[heads, pairs, 2, ...] to [heads, 2, pairs, ...]; nothing changes within a row."""
    if not num_heads:
        return rows
    heads = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return heads.swapaxes(1, 2).reshape(rows.shape)


def _stored(
    name: str, matrix: npt.NDArray[Any], kind: GGMLQuantizationType, block_type: BlockType | None
) -> tuple[str, Tensor]:
    if block_type is None:
        return f"{name}.weight", torch.from_numpy(np.array(dequantize(matrix, kind), np.float32))
    blocks = matrix.reshape(len(matrix), -1, block_type.num_bytes)
    return name + SUFFIX, torch.from_numpy(blocks.copy())
