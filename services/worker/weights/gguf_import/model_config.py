"""Makes a config.json of a GGUF file's metadata and of the names of its tensors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.weights.gguf_import.architecture import Architecture
from services.worker.weights.gguf_import.metadata import Metadata, UnsupportedGgufError
from services.worker.weights.gguf_import.rope import rope_parameters


def model_config(
    metadata: Metadata,
    architecture: Architecture,
    *,
    vocab_size: int,
    names: Collection[str],
    factors: npt.NDArray[np.float32] | None,
) -> dict[str, Any]:
    """Make config.json, but for what depends on the formats of the weights.

    Args:
        names: The names of the file's tensors.
        factors: The values of `rope.FACTORS`, if there are any.

    Raises:
        UnsupportedGgufError: a value is missing or malformed, or the file has one that would be ignored.
    """
    keys = architecture.keys
    if missing := [key.name for key in keys.values() if key.default is None and key.name not in metadata]:
        raise UnsupportedGgufError(f"lacks {', '.join(missing)}")
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in names,
        **architecture.values,
        **{name: key.read(metadata) for name, key in keys.items()},
        **{name: f"blk.0.{part}" in names for name, part in architecture.flags.items()},
    }
    # Before anything is made for each of them.
    if (num_layers := config["num_hidden_layers"]) > len(names):
        raise UnsupportedGgufError(f"has block_count {num_layers}, but only {len(names)} tensors")
    _without_drafts(config, names)
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = metadata.size("attention.head_count_kv", default=heads)
    rotary_dim = architecture.widths(metadata, config)
    config["rope_parameters"] = rope_parameters(metadata, rotary_dim, factors)
    architecture.extend(metadata, config, names)
    metadata.refuse_unread()
    return config


def _without_drafts(config: dict[str, Any], names: Collection[str]) -> None:
    """Forget the blocks that draft where another file has their tensors, as llama.cpp's `--no-mtp` writes them."""
    num_layers, num_drafts = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    prefixes = tuple(f"blk.{layer}." for layer in range(max(num_layers - num_drafts, 1), num_layers))
    if num_drafts and not any(name.startswith(prefixes) for name in names):
        config["num_hidden_layers"] -= num_drafts
        config["num_nextn_predict_layers"] = 0
