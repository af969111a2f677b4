"""What a model directory and the options decide before a tensor is read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import override

from services.worker.models.loader import ORDINARY, LoadOptions, read_formats
from services.worker.models.registry import CausalLM, loader_for
from services.worker.ops import Ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.reference.backend import ReferenceOps
from services.worker.parallel.communicator import SINGLE, Parallel
from services.worker.recorded_config import RecordedConfig
from services.worker.weights.planned_weights import PlannedWeights
from services.worker.weights.sampling_defaults import sampling_defaults
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.embedders import served_config
from shared.model_files.model_dir import read_config
from shared.request.limits import ModelLimits

# The modules that log what a configuration says while a model is built.
_BUILDERS = ("services.worker.layers.rotary", "services.worker.models.parts.plain_attention")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model, or a rank's part of one, without its weights."""

    model: CausalLM
    """Its tensors have no values: only what it says of itself may be used."""
    has_experts: bool
    """Whether expert parallelism has an effect."""
    packed_formats: frozenset[MatrixFormat]
    """See `PlannedWeights`."""
    model_dir: Path
    options: LoadOptions


def plan_model(
    model_dir: Path, ops: Ops, dtype: torch.dtype, *, options: LoadOptions = ORDINARY, parallel: Parallel = SINGLE
) -> PlannedModel:
    """Build what `load_model` would load, on no device, and raise what it would raise without a look at the weights.

    Nothing is logged. Files of weights are opened only for layers for multi-token prediction, which a configuration may
    count though they are not stored; then their headers alone are read.

    Raises:
        ModelDirectoryError: config.json or generation_config.json is missing, malformed or not supported; the model's
            own context is shorter than `options.context`; or the model cannot be split over the ranks.
    """
    config = RecordedConfig(served_config(read_config(model_dir), options.task))
    build = loader_for(config, with_mtp=options.with_mtp, wanted=options.implementation)
    stored, formats = read_formats(model_dir, config, ops, options)

    def build_with(names: Container[str] | None) -> tuple[CausalLM, PlannedWeights]:
        weights = PlannedWeights(dtype, stored, formats=formats, names=names)
        # The backend's own functions would prepare matrices, and there are none.
        shard = options.shard(ReferenceOps(), weights, parallel)
        with _unlogged():
            return build(config, shard), weights

    # Dummy weights store nothing.
    has_files = options.dummy_seed is None
    model, weights = build_with(None if has_files else ())
    if has_files and model.mtp is not None:
        with WeightFiles(model_dir, name_of=options.name_of(config)) as files:
            names = frozenset(files.names)
        model, weights = build_with(names)
    limits = ModelLimits(model.context_length, model.logits_width, num_pool_tokens=model.context_length)
    sampling_defaults(model_dir, limits)
    return PlannedModel(model, weights.has_experts, frozenset(weights.packed_formats), model_dir, options)


class _OtherThreads(logging.Filter):
    """Passes what other threads log than the one that made it: ranks of tests are threads, and load at once."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


@contextmanager
def _unlogged() -> Iterator[None]:
    """Leave what is logged to the load."""
    others, loggers = _OtherThreads(), [logging.getLogger(name) for name in _BUILDERS]
    for each in loggers:
        each.addFilter(others)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(others)
