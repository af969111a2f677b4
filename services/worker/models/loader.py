"""From a model directory to a model that is ready to run.

Everything in the directory is read as data: JSON and safetensors. A tied head and fused projections are resolved
in the model file, quantised layers behind `ModelWeights`; the rest of the worker sees a `CausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.worker.layers.shard import Shard
from services.worker.models.registry import CausalLM, ModelLoader, loader_for
from services.worker.ops import Ops
from services.worker.parallel.communicator import SINGLE, Parallel
from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.dummy_weights import DummyWeights, dummy_digest
from services.worker.weights.freed_memory import return_freed_memory
from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.sampling_defaults import SamplingDefaults, sampling_defaults
from services.worker.weights.weight_files import WeightFiles
from shared.limits import ModelLimits
from shared.model_dir import CONFIG, TOKENIZER, eos_token_ids, model_digest, read_json

# What checkpoints carry and no model asks for: old ones store the rotary frequencies, tied ones the head again.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rest of the cell has to know of a model."""

    context_length: int
    logits_width: int
    eos_token_ids: tuple[int, ...]
    model_digest: str
    sampling_defaults: SamplingDefaults


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What of a model is loaded."""

    # Layers for multi-token prediction too, where there are any.
    with_mtp: bool = False
    # Seed of random weights, instead of those in the directory; None for none.
    dummy_seed: int | None = None


ORDINARY = LoadOptions()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or a rank's part of one, that is ready to run."""

    model: CausalLM
    facts: ModelFacts
    # SHA-256 over name, dtype, shape and bytes of every tensor of the whole model, in hex.
    weights_digest: str
    model_dir: Path


def load_model(
    model_dir: Path,
    ops: Ops,
    dtype: torch.dtype,
    on_progress: Callable[[float], None],
    *,
    options: LoadOptions = ORDINARY,
    parallel: Parallel = SINGLE,
) -> LoadedModel:
    """Load a model directory, or a rank's part of it; about a second for half a gigabyte.

    Args:
        model_dir: In Hugging Face's layout: config.json, tokenizer.json, model.safetensors or shards with an index.
            For dummy weights config.json is enough.
        ops: The backend that prepares and runs the weights.
        dtype: What the model computes in.
        on_progress: Called with the share of bytes read, 0 to 1, 1.0 last; from this thread. What it raises ends the
            loading.
        options: What of it is loaded.
        parallel: Where the rank stands among those that the model is split over.

    Raises:
        ModelDirectoryError: a file is missing or malformed, the architecture or a format is unknown, or configuration
            and weights do not fit each other, or the model cannot be split so, or the generation configuration holds
            what no request may ask for.
    """
    config = read_json(model_dir, CONFIG)
    build = loader_for(config, with_mtp=options.with_mtp)
    eos_ids = eos_token_ids(model_dir)
    if options.dummy_seed is None:
        digest = model_digest(model_dir)
        quantization = QuantizationConfig.from_json(config)
        with WeightFiles(model_dir, on_progress) as files:
            model = _build_complete(build, config, Shard(ops, CheckpointWeights(files, dtype, quantization), parallel))
            weights_digest = files.digest()
    else:
        weights_digest = dummy_digest((model_dir / CONFIG).read_bytes(), options.dummy_seed)
        # Only who has a tokenizer compares this digest.
        digest = model_digest(model_dir) if (model_dir / TOKENIZER).exists() else weights_digest
        weights = DummyWeights(options.dummy_seed, dtype, on_progress)
        model = _build_complete(build, config, Shard(ops, weights, parallel))
    on_progress(1.0)
    limits = ModelLimits(model.context_length, model.logits_width, num_pool_tokens=model.context_length)
    defaults = sampling_defaults(model_dir, limits)
    facts = ModelFacts(model.context_length, model.logits_width, eos_ids, digest, defaults)
    return LoadedModel(model, facts, weights_digest, model_dir)


def _build_complete(build: ModelLoader, config: Mapping[str, Any], shard: Shard) -> CausalLM:
    """The model, with every tensor that it needs and none that it does not know."""
    shard.weights.ignore(suffixes=_IGNORED_SUFFIXES)
    with return_freed_memory():
        model = build(config, shard)
    shard.weights.check_complete()
    return model
