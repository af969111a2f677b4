"""From a model directory to a model that is ready to run.

Everything in the directory is read as data: JSON and safetensors. A tied head and fused projections are resolved
here and in the model file; the rest of the worker sees a `CausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from services.worker.models.registry import CausalLM, loader_for
from services.worker.ops import Ops
from services.worker.sampling_defaults import SamplingDefaults, sampling_defaults
from services.worker.weights import ModelWeights, WeightFiles
from shared.limits import ModelLimits
from shared.model_dir import CONFIG, eos_token_ids, model_digest, read_json


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rest of the cell has to know of a model."""

    context_length: int
    logits_width: int
    eos_token_ids: tuple[int, ...]
    model_digest: str
    sampling_defaults: SamplingDefaults


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    model: CausalLM
    facts: ModelFacts
    # SHA-256 over every tensor's name, dtype, shape and bytes, in hex.
    weights_digest: str
    model_dir: Path


def load_model(model_dir: Path, ops: Ops, dtype: torch.dtype, on_progress: Callable[[float], None]) -> LoadedModel:
    """Load a model directory; about a second for half a gigabyte.

    Args:
        model_dir: In Hugging Face's layout: config.json, tokenizer.json, model.safetensors or shards with an index.
        ops: The backend that prepares and runs the weights.
        dtype: What the model computes in.
        on_progress: Called with the share of bytes read, above 0, 1.0 last; from this thread.

    Raises:
        ModelDirectoryError: a file is missing or malformed, the architecture is unknown, or configuration and
            weights do not fit each other, or the generation configuration holds what no request may ask for.
    """
    config = read_json(model_dir, CONFIG)
    load = loader_for(config)
    digest = model_digest(model_dir)
    eos_ids = eos_token_ids(model_dir)
    with WeightFiles(model_dir, on_progress) as files:
        model = load(config, ModelWeights(files, dtype), ops)
        weights_digest = files.digest()
    limits = ModelLimits(model.context_length, model.logits_width, num_pool_tokens=model.context_length)
    defaults = sampling_defaults(model_dir, limits)
    facts = ModelFacts(model.context_length, model.logits_width, eos_ids, digest, defaults)
    return LoadedModel(model, facts, weights_digest, model_dir)
