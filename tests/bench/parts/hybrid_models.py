"""A random Qwen3.5 of half a billion weights and a dense Qwen3 with as many: configurations, and what they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 65536,
    "hidden_size": 1024,
}
# The layers of Qwen3.5-0.8B, whose vocabulary is four times as large.
HYBRID: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
# The layers of Qwen3-0.6B, with wider feed-forward networks: as many weights as the other model has.
DENSE: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 3744,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
}
# For a check that the benchmark runs.
_SMALL = {"vocab_size": 40_960, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4}
# Bytes of a layer's weight by format, without scales; heads in int4 models have 8 bits.
FORMAT_TO_BYTES = {"fp32": (4.0, 4.0), "bf16": (2.0, 2.0), "int8": (1.0, 1.0), "int4": (0.5, 1.0)}


@dataclass(frozen=True, slots=True)
class ModelReads:
    """What a decode step reads and writes.

    Attributes:
        num_layer_weights: In the matrices of all layers.
        num_head_weights: In the head's matrix.
        kv_bytes_per_token: In the KV cache.
        state_bytes: Of a sequence's recurrent state; 0 without recurrent layers.
    """

    num_layer_weights: int
    num_head_weights: int
    kv_bytes_per_token: float
    state_bytes: int

    @classmethod
    def of(cls, config: dict[str, Any], *, kv_bytes_per_token: float, state_bytes: int) -> ModelReads:
        """The sizes of one of the two models, of which a runner knows what it caches."""
        hidden, num_layers, head_dim = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
        query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        interval = config.get("full_attention_interval", 1)
        num_attention = num_layers // interval
        # A hybrid model's queries have gates.
        attention = hidden * ((2 if interval == 1 else 3) * query + 2 * kv)
        weights = num_layers * 3 * hidden * config["intermediate_size"] + num_attention * attention
        if interval > 1:
            keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
            values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
            weights += (num_layers - num_attention) * hidden * (2 * keys + 3 * values)
        return cls(weights, config["vocab_size"] * hidden, kv_bytes_per_token, state_bytes)

    def step_bytes(self, form: str, *, num_rows: int, num_tokens: float) -> float:
        """What a step moves between memory and processor: weights, keys and values of `num_tokens` in each of
        `num_rows`, and states, which are read and written.
        """
        of_layer, of_head = FORMAT_TO_BYTES[form]
        weights = self.num_layer_weights * of_layer + self.num_head_weights * of_head
        return weights + num_rows * (num_tokens * self.kv_bytes_per_token + 2 * self.state_bytes)


def small(config: dict[str, Any]) -> dict[str, Any]:
    """A miniature of the model, with the same kinds of layers."""
    return {**config, **_SMALL}
