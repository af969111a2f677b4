"""A random Llama whose weights and activations have outliers like those of trained models, for measures of quality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.tiny_llama import write_tiny_llama

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_DEGREES_OF_FREEDOM = 5
_OUTLIER_CHANNELS = 0.01
_OUTLIER_SCALE = 10.0
# The standard deviation of logits, about that of trained models.
_LOGIT_SPREAD = 3.0


def write_outlier_llama(directory: Path, *, seed: int = 1) -> Path:
    """Write a Llama of 4 layers with the tiny tokenizer; returns `directory`.

    Matrices follow Student's t-distribution with 5 degrees of freedom, with a variance of 1 over their input width.
    Norms are 1, and 10 in 1 % of their channels.

    Args:
        directory: Created if missing.
        seed: Determines the weights.
    """
    write_tiny_llama(directory, changes=SIZES)
    path = directory / "model.safetensors"
    random = np.random.default_rng(seed)
    weights = {name: _draw(name, tensor.shape, random) for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def _draw(name: str, shape: torch.Size, random: np.random.Generator) -> Tensor:
    if len(shape) == 1:
        is_outlier = random.random(shape) < _OUTLIER_CHANNELS
        return torch.from_numpy(np.where(is_outlier, _OUTLIER_SCALE, 1.0).astype(np.float32))
    draws = random.standard_t(_DEGREES_OF_FREEDOM, shape)
    variance = _DEGREES_OF_FREEDOM / (_DEGREES_OF_FREEDOM - 2)
    spread = _LOGIT_SPREAD if name == "lm_head.weight" else 1.0
    return torch.from_numpy((draws * spread / np.sqrt(variance * shape[1])).astype(np.float32))
