"""Loads a model directory, as data only: JSON and safetensors."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.worker.layers.context_limit import NO_LIMIT, ContextLimit
from services.worker.layers.shard import Shard
from services.worker.models.config import RecordedConfig
from services.worker.models.config_keys import unknown_keys
from services.worker.models.parts.mtp import mtp_prefixes
from services.worker.models.registry import CausalLM, ModelLoader, loader_for
from services.worker.ops import Ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.parallel.communicator import SINGLE, Communicator, Parallel
from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.dummy_weights import DummyWeights, dummy_digest
from services.worker.weights.freed_memory import return_freed_memory
from services.worker.weights.model_weights import ModelWeights, WeightFormats
from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.sampling_defaults import SamplingDefaults, sampling_defaults
from services.worker.weights.tensor_digests import Hashing
from services.worker.weights.weight_files import WeightFiles
from shared.limits import ModelLimits
from shared.missing_files import ADAPTER
from shared.model_dir import CONFIG, TOKENIZER, eos_token_ids, is_multimodal, model_digest, read_config
from shared.text_models import text_name

# Stored by some checkpoints but read by no model.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)

_ADAPTERS = (ADAPTER, "adapter_model.safetensors", "adapter_model.bin")

_HOST = torch.device("cpu")

# Bound the line about unknown keys.
_MAX_NAMES, _MAX_NAME = 32, 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rest of the cell needs to know."""

    context_length: int
    logits_width: int
    eos_token_ids: tuple[int, ...]
    model_digest: str
    weights_digest: str
    """`LoadedModel.weights_digest` without the layers for multi-token prediction, whether or not they are loaded: what
    tells models apart whose answers differ, though their configuration and tokenizer are equal."""
    sampling_defaults: SamplingDefaults


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is loaded, and where to."""

    with_mtp: bool = False
    """Whether to load layers for multi-token prediction too."""
    dummy_seed: int | None = None
    """The seed of random weights; None means the directory's weights."""
    device: torch.device = _HOST
    """Where the model computes."""
    quantization: MatrixFormat | None = None
    """What the matrices of a checkpoint that is not quantised are quantised to; None means nothing."""
    kv_dtype: torch.dtype | None = None
    """What keys and values are stored in; None leaves it to the model."""
    context: ContextLimit = NO_LIMIT
    """What bounds the context served."""
    readers: Communicator | None = None
    """The ranks that load it together, each of them whole; None means those that it is split over."""


ORDINARY = LoadOptions()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or a rank's part of one."""

    model: CausalLM
    facts: ModelFacts
    weights_digest: str
    """A digest of `WeightFiles.digest` or `dummy_digest`, and of LongRoPE's factors; the same on all ranks."""
    quantization: MatrixFormat | None
    """`LoadOptions.quantization`."""
    kv_dtype: torch.dtype | None
    """`LoadOptions.kv_dtype`."""
    packed_formats: frozenset[MatrixFormat]
    """What its matrices are in, stored like that or quantised at load; empty if all are dense."""
    model_dir: Path
    device: torch.device
    """Where its weights are, and the arguments and results of its functions."""


def load_model(
    model_dir: Path,
    ops: Ops,
    dtype: torch.dtype,
    on_progress: Callable[[float], None],
    *,
    options: LoadOptions = ORDINARY,
    parallel: Parallel = SINGLE,
) -> LoadedModel:
    """Load a model directory, or a rank's part of it. The ranks of `parallel` load at once, and compare what they read.

    Args:
        model_dir: config.json, tokenizer.json, model.safetensors or shards with an index; config.json is enough for
            dummy weights.
        on_progress: Called on this thread with the fraction of bytes read, 0 to 1, 1.0 last. An exception from it
            aborts the load.

    Raises:
        ModelDirectoryError: a file is missing, malformed or not supported; the model's own context is shorter than
            `options.context`, which is found before weights are read; configuration and weights do not match; the
            model cannot be split over the ranks; the ranks have different weights; or a sampling default is outside
            the range for requests.
        RuntimeError: another rank was lost.
    """
    config = RecordedConfig(read_config(model_dir))
    build = loader_for(config, with_mtp=options.with_mtp)
    _warn_of_adapter(model_dir)
    if is_multimodal(config):
        logger.info("only the text of the model is served", extra={"directory": str(model_dir)})
    eos_ids = eos_token_ids(model_dir)
    if options.dummy_seed is None:
        digest = model_digest(model_dir)
        readers = options.readers or parallel.ep or parallel.tp
        hashing = Hashing(readers, options.device, ops.num_threads)
        name_of = text_name if is_multimodal(config) else str
        with WeightFiles(model_dir, on_progress, hashing=hashing, name_of=name_of) as files:
            weights: ModelWeights = _checkpoint(files, config, ops, dtype, options)
            model = _build_complete(build, config, Shard(ops, weights, parallel, options.kv_dtype, options.context))
            weights_digest = files.digest()
            served_digest = files.digest(without=mtp_prefixes(config))
    else:
        weights_digest = served_digest = dummy_digest((model_dir / CONFIG).read_bytes(), options.dummy_seed)
        # This digest is only compared where there is a tokenizer.
        digest = model_digest(model_dir) if (model_dir / TOKENIZER).exists() else weights_digest
        stored, formats = read_formats(model_dir, config, ops, options)
        seed, device = options.dummy_seed, options.device
        weights = DummyWeights(seed, dtype, on_progress, device, config=stored, formats=formats)
        model = _build_complete(build, config, Shard(ops, weights, parallel, options.kv_dtype, options.context))
    on_progress(1.0)
    _warn_of_unknown(config)
    if model.has_long_factors:
        weights_digest, served_digest = map(_with_long_factors, (weights_digest, served_digest))
    limits = ModelLimits(model.context_length, model.logits_width, num_pool_tokens=model.context_length)
    defaults = sampling_defaults(model_dir, limits)
    facts = ModelFacts(model.context_length, model.logits_width, eos_ids, digest, served_digest, defaults)
    packed_formats = frozenset(weights.packed_formats)
    return LoadedModel(
        model,
        facts,
        weights_digest,
        options.quantization,
        options.kv_dtype,
        packed_formats,
        model_dir,
        options.device,
    )


def _with_long_factors(digest: str) -> str:
    """The digest of a model with these weights whose positions have LongRoPE's long factors."""
    return hashlib.sha256(f"long factors:{digest}".encode()).hexdigest()


def _warn_of_adapter(model_dir: Path) -> None:
    """transformers loads an adapter beside a base model with it; here only the base model is served."""
    if names := [name for name in _ADAPTERS if (model_dir / name).exists()]:
        logger.warning(
            "the directory has an adapter, which is not used: only its base model is served",
            extra={"directory": str(model_dir), "files": names},
        )


def _warn_of_unknown(config: RecordedConfig) -> None:
    """Name what nothing is known of."""
    if names := unknown_keys(config):
        shown = [name[:_MAX_NAME] for name in names[:_MAX_NAMES]]
        logger.warning(
            "config.json has keys that this release does not know, and does without; a newer one may know them",
            extra={"keys": shown, "num_keys": len(names)},
        )


def _checkpoint(
    files: WeightFiles, config: Mapping[str, Any], ops: Ops, dtype: torch.dtype, options: LoadOptions
) -> CheckpointWeights:
    stored, formats = read_formats(files.model_dir, config, ops, options)
    return CheckpointWeights(files, dtype, stored, options.device, formats=formats)


def read_formats(
    model_dir: Path, config: Mapping[str, Any], ops: Ops, options: LoadOptions
) -> tuple[QuantizationConfig, WeightFormats]:
    """What a checkpoint is stored in, and what that becomes; one that is quantised already stays as it is."""
    stored = QuantizationConfig.read(model_dir, config)
    return stored, WeightFormats(ops.formats, None if stored.is_quantized else options.quantization)


def _build_complete(build: ModelLoader, config: Mapping[str, Any], shard: Shard) -> CausalLM:
    """Check that exactly the needed tensors are stored."""
    shard.weights.ignore(suffixes=_IGNORED_SUFFIXES)
    with return_freed_memory():
        model = build(config, shard)
    shard.weights.check_complete()
    return model
