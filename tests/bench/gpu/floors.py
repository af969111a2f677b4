"""The shortest time that a step can take on a device whose rates were measured.

Every product and every attention takes its bytes at the rate of a copy, or its operations at the rate of a large
product, whichever takes longer; they follow one another. Of a product only the weights count as bytes, and of attention
only the cache: what is smaller may stay on the chip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.bench.gpu.configs import Config

# Of scales: float32 in FP8 checkpoints, bfloat16 in packed integers; a byte for 32 values in MXFP4.
_FP8_SCALE_BYTES, _INT_SCALE_BYTES = 4, 2
_MXFP4_BYTES = 0.5 + 1 / 32


@dataclass(frozen=True, slots=True)
class Work:
    """One product, or one layer's attention."""

    num_bytes: float
    num_operations: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device was measured to do."""

    bytes_per_s: float
    operations_per_s: float

    def floor_s(self, works: Iterable[Work]) -> float:
        """The shortest time for works, one after the other."""
        return sum(
            max(work.num_bytes / self.bytes_per_s, work.num_operations / self.operations_per_s) for work in works
        )


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step computes."""

    num_tokens: int
    num_logits: int
    """Tokens whose logits are needed."""
    num_attended: float
    """Positions that all tokens attend to, without a window."""
    num_read: float
    """Positions of the cache that are read, without a window."""
    num_touched: float = 0.0
    """Experts of a layer that any token chooses."""


def decode_size(num_seqs: int, context_len: int, num_touched: float = 0.0) -> StepSize:
    """A decode step of sequences that have `context_len` tokens."""
    num_read = num_seqs * context_len
    return StepSize(num_seqs, num_seqs, num_read, num_read, num_touched)


def prefill_size(num_seqs: int, length: int, num_touched: float = 0.0) -> StepSize:
    """A step of whole prompts, whose last tokens' logits are needed."""
    num_attended = num_seqs * length * (length + 1) / 2
    return StepSize(num_seqs * length, num_seqs, num_attended, num_seqs * length, num_touched)


def expected_touched(num_experts: int, num_chosen: int, num_tokens: int) -> float:
    """Experts that tokens touch if each chooses independently and all experts are equally likely."""
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens)


def step_works(config: Config, item_bytes: int, size: StepSize) -> list[Work]:
    """Every product and attention of a step of a model whose plain weights and cache have `item_bytes` per value."""
    works = [work for layer in range(config["num_hidden_layers"]) for work in _layer(config, item_bytes, size, layer)]
    head = config["hidden_size"] * config["vocab_size"]
    return [*works, Work(head * item_bytes, 2 * head * size.num_logits)]


def num_experts(config: Config) -> int:
    """The routed experts of a layer; 0 if all layers are dense."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((int(config[name]) for name in names if name in config), 0)


def _layer(config: Config, item_bytes: int, size: StepSize, layer: int) -> Iterator[Work]:
    weight_bytes = linear_bytes(config, item_bytes)
    is_latent = "kv_lora_rank" in config
    for num_weights in _latent_products(config) if is_latent else _attention_products(config):
        yield _product(num_weights, weight_bytes, size.num_tokens)
    yield _latents(config, item_bytes, size) if is_latent else _attention(config, item_bytes, size, layer)
    hidden = config["hidden_size"]
    if not num_experts(config) or layer < config.get("first_k_dense_replace", 0):
        yield from _mlp(hidden, config["intermediate_size"], weight_bytes, size.num_tokens)
        return
    inner = config["moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"]
    # Routers are plain.
    yield _product(num_experts(config) * hidden, item_bytes, size.num_tokens)
    if "n_shared_experts" in config:
        yield from _mlp(hidden, config["n_shared_experts"] * inner, weight_bytes, size.num_tokens)
    num_pairs = config["num_experts_per_tok"] * size.num_tokens
    for num_weights in (2 * inner * hidden, hidden * inner):
        read = size.num_touched * num_weights * expert_bytes(config, item_bytes)
        yield Work(read, 2 * num_weights * num_pairs)


def _mlp(hidden: int, inner: int, weight_bytes: float, num_tokens: int) -> Iterator[Work]:
    yield _product(2 * inner * hidden, weight_bytes, num_tokens)
    yield _product(hidden * inner, weight_bytes, num_tokens)


def _product(num_weights: int, weight_bytes: float, num_tokens: int) -> Work:
    return Work(num_weights * weight_bytes, 2 * num_weights * num_tokens)


def _attention_products(config: Config) -> tuple[int, int]:
    """Weights of the projections to query, key and value, and of the output's."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["hidden_size"] * config["head_dim"]
    return width * (heads + 2 * kv_heads), width * heads


def _latent_products(config: Config) -> tuple[int, ...]:
    """Weights down to the latents, up to the query, into the latent space and out of it, and of the output."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, query_latent = config["kv_lora_rank"], config["q_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    down = (query_latent + latent + rope) * hidden
    return (
        down,
        heads * (nope + rope) * query_latent,
        heads * nope * latent,
        heads * value * latent,
        hidden * heads * value,
    )


def _attention(config: Config, item_bytes: int, size: StepSize, layer: int) -> Work:
    part = _window_part(config, size, layer)
    heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    return Work(
        2 * kv_heads * width * item_bytes * size.num_read * part,
        4 * heads * width * size.num_attended * part,
    )


def _latents(config: Config, item_bytes: int, size: StepSize) -> Work:
    """All heads share one key per token, whose first part is the value."""
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    num_operations = 2 * config["num_attention_heads"] * (2 * latent + rope) * size.num_attended
    return Work((latent + rope) * item_bytes * size.num_read, num_operations)


def _window_part(config: Config, size: StepSize, layer: int) -> float:
    """The part of its context that a token sees in this layer of a decode step; gpt-oss has a window in even layers."""
    window = config.get("sliding_window")
    if not window or layer % 2 or not size.num_attended:
        return 1.0
    return float(min(1.0, window * size.num_tokens / size.num_attended))


def linear_bytes(config: Config, item_bytes: int) -> float:
    """Bytes per weight of linear layers, scales included."""
    quantization = config.get("quantization_config", {})
    method = quantization.get("quant_method")
    if method == "fp8":
        num_rows, num_columns = quantization["weight_block_size"]
        return float(1 + _FP8_SCALE_BYTES / (num_rows * num_columns))
    if method == "compressed-tensors":
        weights = quantization["config_groups"]["group_0"]["weights"]
        return float(weights["num_bits"] / 8 + _INT_SCALE_BYTES / weights["group_size"])
    return item_bytes


def expert_bytes(config: Config, item_bytes: int) -> float:
    """Bytes per weight of experts, scales included; in MXFP4 checkpoints only these are packed."""
    is_mxfp4 = config.get("quantization_config", {}).get("quant_method") == "mxfp4"
    return _MXFP4_BYTES if is_mxfp4 else linear_bytes(config, item_bytes)
