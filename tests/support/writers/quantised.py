"""Small checkpoints that a quantiser wrote: what ours reads of them, beside what the quantiser's own library reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import CONFIG
from tests.support.models.parity import TransformersModel, load_paged, make_prompts, wrong_rows
from tests.support.models.small_configs import SMALL_CONFIGS
from tests.support.models.small_models import build_model, write_small_model
from tests.support.models.tiny_tokenizer import write_tiny_tokenizer

VALUES = "values.safetensors"
"""What each script writes beside a checkpoint: the weights of quantised layers, as its library decompresses them."""
_SUFFIX = ".weight"
# Whole groups and blocks of 128.
_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def write_plain(directory: Path) -> Path:
    """A small Llama whose layers fit every scheme's groups."""
    values = {**SMALL_CONFIGS["LlamaForCausalLM"]["plain"], **_SIZES}
    return write_small_model(build_model("LlamaForCausalLM", values), directory)


def complete(directory: Path) -> None:
    """Add the tokenizer's files, which quantisers copy only where transformers knows the tokenizer."""
    write_tiny_tokenizer(directory)


def values_read(directory: Path) -> dict[str, Tensor]:
    """The weights of quantised layers in float32, as we read them."""
    theirs, config = load_file(directory / VALUES), json.loads((directory / CONFIG).read_text())
    assert theirs
    with WeightFiles(directory) as files:
        ours = CheckpointWeights(files, torch.float32, QuantizationConfig.read(directory, config))
        return {
            name: ours.dense(name.removesuffix(_SUFFIX), (each.shape[0], each.shape[1]))
            for name, each in theirs.items()
        }


def wrong_layers(directory: Path) -> list[str]:
    """The layers whose weights are not exactly those of the quantiser's library, in the type that it reads them in."""
    theirs, ours = load_file(directory / VALUES), values_read(directory)
    return [name for name, values in theirs.items() if not torch.equal(ours[name].to(values.dtype), values)]


def wrong_logits(directory: Path, plain: Path) -> list[int]:
    """The rows of prompts whose logits are not those of transformers on the values read."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    assert not model.load_state_dict(values_read(directory), strict=False).unexpected_keys
    theirs, paged = TransformersModel(model.eval()), load_paged(directory, "cpu")
    prompts = make_prompts((1, 40))
    return [row for prompt in prompts for row in wrong_rows(paged.prefill_all(paged.add(prompt)), theirs, prompt)]
