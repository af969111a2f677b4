"""A GGUF file of the random Qwen3.5 of the benchmark of recurrent layers, made once, in .cache/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.bench.peers.cpu_files import DIRECTORY, add_random, made_file, write_all

_ARCHITECTURE = "qwen35"
# A text's positions have one value, so the sections only have to add up.
_ROPE_SECTIONS = (11, 11, 10, 0)
# The convolution, a decay per head, and what is added to its input.
_TAP, _DECAY, _DT_BIAS = 0.25, -1.0, 0.1


def hybrid_gguf(config: dict[str, Any]) -> Path:
    """A GGUF file with random weights in Q8_0 and no vocabulary; `config` is that of a dense Qwen3.5.

    Returns:
        The path without `.q8_0`, as of the file that llama.cpp would quantise.
    """
    source = DIRECTORY / f"qwen3.5-{config['hidden_size']}-{config['num_hidden_layers']}.gguf"
    target = source.with_suffix(".q8_0.gguf")
    if not target.exists():
        with made_file(target) as made:
            writer = gguf.GGUFWriter(made, _ARCHITECTURE)
            _add_sizes(writer, config)
            for name, shape in _matrices(config):
                add_random(writer, f"{name}.weight", shape)
            for name, size, value in _vectors(config):
                writer.add_tensor(name, np.full(size, value, np.float32))
            write_all(writer)
    return source


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope, head_dim = config["rope_parameters"], config["head_dim"]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections(_ROPE_SECTIONS)
    writer.add_uint32(f"{_ARCHITECTURE}.full_attention_interval", config["full_attention_interval"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])


def _matrices(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, wide, num_heads = config["hidden_size"], config["intermediate_size"], config["linear_num_value_heads"]
    keys, values = _widths(config)
    query, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    yield "token_embd", (config["vocab_size"], hidden)
    for layer, attends in _layers(config):
        recurrent = {
            "attn_qkv": (2 * keys + values, hidden),
            "attn_gate": (values, hidden),
            "ssm_beta": (num_heads, hidden),
            "ssm_alpha": (num_heads, hidden),
            "ssm_out": (hidden, values),
        }
        attention = {
            "attn_q": (2 * query, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, query),
        }
        feed_forward = {"ffn_gate": (wide, hidden), "ffn_up": (wide, hidden), "ffn_down": (hidden, wide)}
        for name, shape in ((attention if attends else recurrent) | feed_forward).items():
            yield f"blk.{layer}.{name}", shape


def _vectors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float]]:
    hidden, num_heads, head_dim = config["hidden_size"], config["linear_num_value_heads"], config["head_dim"]
    keys, values = _widths(config)
    yield "output_norm.weight", (hidden,), 1.0
    for layer, attends in _layers(config):
        prefix = f"blk.{layer}"
        for name in ("attn_norm", "post_attention_norm"):
            yield f"{prefix}.{name}.weight", (hidden,), 1.0
        if attends:
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"{prefix}.{name}.weight", (head_dim,), 1.0
        else:
            yield f"{prefix}.ssm_conv1d.weight", (2 * keys + values, config["linear_conv_kernel_dim"]), _TAP
            yield f"{prefix}.ssm_norm.weight", (config["linear_value_head_dim"],), 1.0
            yield f"{prefix}.ssm_dt.bias", (num_heads,), _DT_BIAS
            yield f"{prefix}.ssm_a", (num_heads,), _DECAY


def _widths(config: dict[str, Any]) -> tuple[int, int]:
    """Columns of all keys, and of all values."""
    return (
        config["linear_num_key_heads"] * config["linear_key_head_dim"],
        config["linear_num_value_heads"] * config["linear_value_head_dim"],
    )


def _layers(config: dict[str, Any]) -> Iterator[tuple[int, bool]]:
    """Each layer, and whether it has attention."""
    for layer in range(config["num_hidden_layers"]):
        yield layer, (layer + 1) % config["full_attention_interval"] == 0
