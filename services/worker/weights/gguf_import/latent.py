"""Multi-head latent attention in GGUF files: its sizes, and the rule for what llama.cpp divides.

Files of before 2025 have the projection from the latents as it is; later ones have its parts for keys, transposed, and
for values, and call the width of the latents the head's.

Source: llama.cpp, conversion/deepseek.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from services.worker.weights.gguf_import.architecture import Config, plain_sizes
from services.worker.weights.gguf_import.gguf_file import GgufTensor
from services.worker.weights.gguf_import.metadata import Metadata, UnsupportedGgufError
from services.worker.weights.gguf_import.tensors import Parts, ResultTensors, Rule, Sizes, read_values

_KEYS, _VALUES = "attn_k_b.weight", "attn_v_b.weight"


def latent_widths(metadata: Metadata, config: Config) -> int:
    """The sizes of the latents and of heads; what is rotated is a part of its own. See `Architecture.widths`."""
    rope_dim = metadata.size("rope.dimension_count")
    key = metadata.size("attention.key_length_mla", default=metadata.size("attention.key_length"))
    value = metadata.size("attention.value_length_mla", default=metadata.size("attention.value_length"))
    if key <= rope_dim:
        raise UnsupportedGgufError(f"has keys of {key} columns, of which {rope_dim} are rotated")
    config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"] = rope_dim, key - rope_dim, value
    config["kv_lora_rank"] = metadata.size("attention.kv_lora_rank")
    config["q_lora_rank"] = metadata.count("attention.q_lora_rank", default=0) or None
    # A latent is one key head to llama.cpp.
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["head_dim"] = rope_dim
    return rope_dim


def latent_sizes(config: Config) -> Sizes:
    """The sizes that rules of these models name."""
    heads = config["num_attention_heads"]
    plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        **plain_sizes(config),
        "query": heads * (plain + config["qk_rope_head_dim"]),
        "query_latent": config["q_lora_rank"] or 0,
        "latent": config["kv_lora_rank"],
        "cached": config["kv_lora_rank"] + config["qk_rope_head_dim"],
        "plain": plain,
        "value": value,
        "from_latent": heads * (plain + value),
        "attended": heads * value,
    }


@dataclass(frozen=True, slots=True)
class DividedProjection(Rule):
    """`kv_b_proj`, each head's keys before its values."""

    name: str

    def shapes(self, sizes: Sizes) -> Mapping[str, tuple[int, ...]]:
        """See `Rule`."""
        heads, latent = sizes["heads"], sizes["latent"]
        return {_KEYS: (heads, latent, sizes["plain"]), _VALUES: (heads, sizes["value"], latent)}

    def convert(self, tensors: Mapping[str, GgufTensor], prefix: str, sizes: Sizes, results: ResultTensors) -> None:
        """See `Rule`."""
        keys, values = tensors[_KEYS], tensors[_VALUES]
        shape = (sizes["from_latent"], sizes["latent"])
        results.add_values(prefix + self.name, [keys, values], shape, partial(_heads, keys, values))


def _heads(keys: GgufTensor, values: GgufTensor) -> Parts:
    for head in range(keys.shape[0]):
        of_keys, of_values = (
            read_values(tensor, head * tensor.shape[1], (head + 1) * tensor.shape[1]) for tensor in (keys, values)
        )
        yield np.concatenate((of_keys.T, of_values))
