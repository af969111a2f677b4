"""Loads a model directory, as data only: JSON and safetensors."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.worker.layers.context_limit import NO_LIMIT, ContextLimit
from services.worker.layers.shard import Shard
from services.worker.models.config_keys import unknown_keys
from services.worker.models.parts.mtp import mtp_prefixes
from services.worker.models.registry import CausalLM, ModelLoader, code_of, loader_for
from services.worker.ops import Ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.prepared import KeptError
from services.worker.parallel.communicator import SINGLE, Communicator, Parallel
from services.worker.recorded_config import RecordedConfig, warn_of_unknown
from services.worker.weights.checkpoint import CheckpointWeights
from services.worker.weights.dummy_weights import DummyWeights, dummy_digest
from services.worker.weights.freed_memory import return_freed_memory
from services.worker.weights.model_weights import ModelWeights, WeightFormats
from services.worker.weights.packed.packed_model import (
    PackedModel,
    Wanted,
    are_kept_by_all,
    find_packed,
)
from services.worker.weights.packed.recording import RecordedWeights
from services.worker.weights.packed.replay import KeptMemory
from services.worker.weights.quantization.config import QuantizationConfig
from services.worker.weights.sampling_defaults import SamplingDefaults, sampling_defaults, unknown_options
from services.worker.weights.tensor_digests import Hashing
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.embedders import HEADS, Task, headless_name, served_config
from shared.model_files.implementations import WantedImplementation
from shared.model_files.missing_files import ADAPTER
from shared.model_files.model_dir import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    ModelDirectoryError,
    eos_token_ids,
    is_multimodal,
    model_digest,
    read_config,
)
from shared.model_files.packed_files import PackedCache
from shared.model_files.text_models import text_name
from shared.request.limits import ModelLimits

# Stored by some checkpoints but read by no model.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)

_ADAPTERS = (ADAPTER, "adapter_model.safetensors", "adapter_model.bin")

_HOST = torch.device("cpu")

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
    task: Task = "generate"
    """`LoadOptions.task`."""


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
    implementation: WantedImplementation = "auto"
    """Whose code computes the model."""
    packed: PackedCache | None = None
    """Where packed weights are kept, and found again; None means nowhere."""
    task: Task = "generate"
    """What the model is served for."""

    @property
    def has_head(self) -> bool:
        """Whether the model's head is loaded."""
        return self.task == "generate"

    def shard(self, ops: Ops, weights: ModelWeights, parallel: Parallel) -> Shard:
        """What the layers are built from."""
        return Shard(ops, weights, parallel, self.kv_dtype, self.context, has_head=self.has_head)

    def name_of(self, config: Mapping[str, Any]) -> Callable[[str], str | None]:
        """What the language model calls a stored tensor; None for one that is left out."""
        of_text = text_name if is_multimodal(config) else str
        if self.has_head:
            return of_text

        def headless(stored: str) -> str | None:
            name = of_text(stored)
            return name and headless_name(name)

        return headless


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
        PartnerLostError: another rank was lost.
    """
    config = RecordedConfig(served_config(read_config(model_dir), options.task))
    build = loader_for(config, with_mtp=options.with_mtp, wanted=options.implementation)
    _warn_of_adapter(model_dir)
    if is_multimodal(config):
        logger.info("only the text of the model is served", extra={"directory": str(model_dir)})
    eos_ids = eos_token_ids(model_dir)
    quantised, formats = read_formats(model_dir, config, ops, options)
    if options.dummy_seed is None:
        digest = model_digest(model_dir)
        stored = _load_stored(
            build, config, ops, _Load(model_dir, dtype, on_progress, options, parallel), (quantised, formats)
        )
        model, packed_formats = stored.model, stored.packed_formats
        weights_digest, served_digest = stored.weights_digest, stored.served_digest
    else:
        weights_digest = served_digest = dummy_digest((model_dir / CONFIG).read_bytes(), options.dummy_seed)
        # This digest is only compared where there is a tokenizer.
        digest = model_digest(model_dir) if (model_dir / TOKENIZER).exists() else weights_digest
        seed, device = options.dummy_seed, options.device
        weights = DummyWeights(seed, dtype, on_progress, device, config=quantised, formats=formats)
        model = _build_complete(build, config, options.shard(ops, weights, parallel))
        packed_formats = frozenset(weights.packed_formats)
    on_progress(1.0)
    _warn_of_unknown(model_dir, unknown_keys(config, model.implementation), quantised)
    if model.has_long_factors:
        weights_digest, served_digest = map(_with_long_factors, (weights_digest, served_digest))
    limits = ModelLimits(model.context_length, model.logits_width, num_pool_tokens=model.context_length)
    defaults = sampling_defaults(model_dir, limits)
    facts = ModelFacts(model.context_length, model.logits_width, eos_ids, digest, served_digest, defaults, options.task)
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


@dataclass(frozen=True, slots=True)
class _Load:
    """What `load_model` was called with."""

    model_dir: Path
    dtype: torch.dtype
    on_progress: Callable[[float], None]
    options: LoadOptions
    parallel: Parallel

    def shard(self, ops: Ops, weights: ModelWeights) -> Shard:
        """What the layers are built from."""
        return self.options.shard(ops, weights, self.parallel)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A model that was loaded from files."""

    model: CausalLM
    weights_digest: str
    """`WeightFiles.digest`."""
    served_digest: str
    """The same without layers for multi-token prediction."""
    packed_formats: frozenset[MatrixFormat]

    @property
    def facts(self) -> dict[str, Any]:
        """All but the model, as JSON."""
        formats = sorted(each.value for each in self.packed_formats)
        return {
            "weights_digest": self.weights_digest,
            "served_digest": self.served_digest,
            "packed_formats": formats,
        }


def _load_stored(
    build: ModelLoader,
    config: RecordedConfig,
    ops: Ops,
    load: _Load,
    formats: tuple[QuantizationConfig, WeightFormats],
) -> _Stored:
    """From files of packed weights if every rank has its own, or else from the model's files."""
    options, mtp = load.options, mtp_prefixes(config)
    readers = options.readers or load.parallel.ep or load.parallel.tp
    wanted = Wanted(
        load.dtype,
        options.quantization,
        options.with_mtp,
        load.parallel,
        code_of(config, options.implementation),
        options.task,
    )
    with ExitStack() as stack:
        packed = find_packed(options.packed, ops, load.model_dir, wanted)
        kept = None if packed is None else stack.enter_context(packed).read(load.on_progress)
        if are_kept_by_all(kept, readers, options.device):
            assert packed is not None
            assert kept is not None
            return _replay(build, config, ops, load, packed=packed, kept=kept)
        recorder = None
        if packed is not None and kept is None and (recorder := packed.record()) is not None:
            stack.enter_context(recorder)
        hashing = Hashing(readers, options.device, ops.num_threads)
        with WeightFiles(load.model_dir, load.on_progress, hashing=hashing, name_of=options.name_of(config)) as files:
            quantised, kept_formats = formats
            weights = CheckpointWeights(files, load.dtype, quantised, options.device, formats=kept_formats)
            if recorder is None:
                model = _build_complete(build, config, load.shard(ops, weights))
            else:
                with recorder.keeps(ops.packing):
                    model = _build_complete(build, config, load.shard(ops, RecordedWeights(weights, recorder)))
            stored = _Stored(model, files.digest(), files.digest(without=mtp), frozenset(weights.packed_formats))
        if packed is not None and recorder is not None:
            packed.publish(recorder, stored.facts)
        return stored


def _replay(
    build: ModelLoader, config: RecordedConfig, ops: Ops, load: _Load, *, packed: PackedModel, kept: KeptMemory
) -> _Stored:
    """From the file of packed weights, which is removed if it does not fit."""
    facts = kept.facts
    formats = frozenset(MatrixFormat(each) for each in facts["packed_formats"])
    assert ops.packing is not None, "only packed weights are kept"
    try:
        with ops.packing.kept_by(kept.keep):
            model = _build_complete(build, config, load.shard(ops, kept.weights(load.dtype, formats)))
    except KeptError as error:
        packed.discard(error)
        raise ModelDirectoryError(
            f"packed weights of {load.model_dir} have {error}; the next start packs anew"
        ) from error
    return _Stored(model, str(facts["weights_digest"]), str(facts["served_digest"]), formats)


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


def _warn_of_unknown(model_dir: Path, names: Sequence[str], stored: QuantizationConfig) -> None:
    if stored.file == CONFIG:
        names = sorted([*names, *stored.unknown_keys])
    else:
        warn_of_unknown(stored.file, stored.unknown_keys)
    warn_of_unknown(CONFIG, names)
    warn_of_unknown(GENERATION_CONFIG, unknown_options(model_dir))


def read_formats(
    model_dir: Path, config: Mapping[str, Any], ops: Ops, options: LoadOptions
) -> tuple[QuantizationConfig, WeightFormats]:
    """What a checkpoint is stored in, and what that becomes; one that is quantised already stays as it is."""
    stored = QuantizationConfig.read(model_dir, config)
    return stored, WeightFormats(ops.formats, None if stored.is_quantized else options.quantization)


def _build_complete(build: ModelLoader, config: Mapping[str, Any], shard: Shard) -> CausalLM:
    """Check that exactly the needed tensors are stored."""
    shard.weights.ignore(prefixes=() if shard.has_head else HEADS, suffixes=_IGNORED_SUFFIXES)
    with return_freed_memory():
        model = build(config, shard)
    shard.weights.check_complete()
    return model
