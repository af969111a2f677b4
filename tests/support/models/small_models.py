"""Small random models of every architecture, made with transformers and written as checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shared.model_files.model_dir import WEIGHTS
from tests.support.models.multimodal import is_multimodal, make_config, published_name
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.tiny_tokenizer import write_tiny_tokenizer

LOGIT_SCALE = 3.0


def build_small_model(architecture: str, variant: str) -> Any:
    """Build a model of `SMALL_CONFIGS`; see `build_model`."""
    return build_model(architecture, SMALL_CONFIGS[architecture][variant])


def build_model(architecture: str, values: Mapping[str, Any], *, seed: int = 1) -> Any:
    """Build transformers' model in float32 with weights that all affect the logits.

    Args:
        values: The values of its configuration.
        seed: Determines the weights.
    """
    model_class = getattr(transformers, architecture)
    model = model_class._from_config(make_config(architecture, values))
    text = model.model.language_model if is_multimodal(architecture) else model
    if type(text)._can_set_experts_implementation():
        # One expert after the other: the grouped matrix products do not support float64.
        text.set_experts_implementation("eager")
    randomise(model, seed, is_tied=model.config.tie_word_embeddings)
    return model.eval()


def write_small_model(model: Any, directory: Path) -> Path:
    """Write a checkpoint with a tokenizer, on which services can start; returns `directory`."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory)
    name_as_published(directory)
    write_tiny_tokenizer(directory)
    return directory


def name_as_published(directory: Path) -> None:
    """Rename the tensors that transformers writes under other names than those that it reads."""
    path = directory / WEIGHTS
    tensors = load_file(path)
    renamed = {published_name(name): tensor for name, tensor in tensors.items()}
    if renamed.keys() != tensors.keys():
        save_file(renamed, path, metadata={"format": "pt"})


@torch.no_grad()
def randomise(model: nn.Module, seed: int, *, is_tied: bool) -> None:
    """Draw every weight, in place.

    transformers initializes norms to what changes nothing and biases and sinks to zero, so that omitting them would not
    be noticed.
    Weights are scaled so that activations keep their size from layer to layer, and logits differ by whole units.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict().items()):
        values = torch.randn(tensor.shape, generator=generator)
        is_norm = values.ndim == 1 and name.endswith("norm.weight")
        # Some families store the factor of a norm without its 1.
        tensor.copy_(tensor + 0.3 * values if is_norm else _scaled(name, values, is_tied=is_tied))


def _scaled(name: str, values: Tensor, *, is_tied: bool) -> Tensor:
    if name.endswith("e_score_correction_bias"):
        return 0.15 * values
    if name.endswith("sinks"):
        return 1 + values
    if name.endswith("bias"):
        return 0.3 * values
    if not values.ndim or not values.numel() or (name.endswith("embed_tokens.weight") and not is_tied):
        return values
    is_head = name.endswith(("embed_tokens.weight", "lm_head.weight"))
    is_decisive = name.endswith(("q_proj.weight", "k_proj.weight", "q_b_proj.weight", "gate.weight", "router.weight"))
    gain = LOGIT_SCALE if is_head else 2.0 if is_decisive else 1.0
    # Linear layers are [out, in]; gpt-oss's stacked experts are [expert, in, out], nearly square here.
    return values * (gain / math.sqrt(values.shape[-1]))
