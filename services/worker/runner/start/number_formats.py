"""Which dtype and quantised format a model computes in, whether ranks agree on it, and the line that says it."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence

import torch

from services.worker.device import DeviceError
from services.worker.models.loader import LoadedModel
from services.worker.models.planning import PlannedModel
from services.worker.ops import Ops
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.parallel.communicator import Communicator, Parallel
from services.worker.runner.start.faster_kernels import library_versions
from shared.model_files.embedders import Task

logger = logging.getLogger(__name__)

# What `kv_cache_dtype` calls a dtype, where that is not torch's name.
_KV_NAMES = {torch.float8_e4m3fn: "fp8"}
# Whole numbers below this are exact in float32, which collectives are sure to take.
_NUM_CODES = 1 << 24


def choose_dtype(setting: str, ops: Ops) -> torch.dtype:
    """Resolve the setting `dtype`.

    Raises:
        DeviceError: the backend does not compute in it.
    """
    if setting == "auto":
        return ops.automatic_dtype
    dtype: torch.dtype = getattr(torch, setting)
    if dtype not in ops.dtypes:
        names = " and ".join(map(_name, ops.dtypes))
        raise DeviceError(f"--dtype {setting}: the backend {ops.name} has only kernels for {names}")
    return dtype


def choose_quantization(setting: str, ops: Ops, *, task: Task = "generate") -> MatrixFormat | None:
    """Resolve the setting `quantization`; None means that nothing is quantised.

    Vectors must equal those that an index has of the model as published, so for these nothing is by default.

    Raises:
        DeviceError: the backend has no kernels for the format.
    """
    if setting == "none" or (setting == "auto" and task == "embed"):
        return None
    if setting == "auto":
        return ops.automatic_quantization
    chosen = MatrixFormat(setting)
    if chosen not in ops.formats:
        raise DeviceError(f"--quantization {setting}: the backend {ops.name} has no kernels for it, but native has")
    return chosen


def choose_kv_dtype(setting: str, dtype: torch.dtype, ops: Ops) -> torch.dtype | None:
    """Resolve the setting `kv_cache_dtype` for a model in `dtype`; None leaves it to the model.

    Raises:
        DeviceError: the backend cannot store keys and values so.
    """
    if setting == "auto":
        return None
    possible = {_KV_NAMES.get(each, _name(each)): each for each in (dtype, *ops.kv_dtypes)}
    if setting not in possible:
        names = ", ".join(sorted(possible))
        raise DeviceError(f"--kv-cache-dtype {setting}: the kernels of {ops.name} have only {names}")
    return possible[setting]


def check_ranks_agree(
    plan: PlannedModel, parallel: Parallel, *, activations: str = "none", graph_batch_sizes: Sequence[int] = ()
) -> None:
    """Compare what ranks chose: where native kernels cannot be built, `auto` means something else.

    Args:
        activations: The setting `activation_quantization`.
        graph_batch_sizes: The decode steps that ranks capture together; none without graphs.

    Raises:
        DeviceError: the choices differ.
    """
    ranks = parallel.ep or parallel.tp
    device = plan.options.device
    choice = f"--dtype {_name(plan.model.dtype)}, {_quantization_flag(plan)}, {_kv_flag(plan)}"
    choice += f", --activation-quantization {activations}"
    if plan.options.task != "generate":
        choice += f", --task {plan.options.task}"
    if not _is_common(choice, ranks, device):
        raise DeviceError(f"ranks differ in their formats: rank {ranks.rank} computes with {choice}")
    context = plan.model.context_length
    if not _is_common(str(context), ranks, device):
        raise DeviceError(f"ranks differ in --max-model-len: rank {ranks.rank} serves a context of {context} tokens")
    sizes = ",".join(map(str, graph_batch_sizes)) or "none"
    if not _is_common(sizes, ranks, device):
        raise DeviceError(f"ranks differ in --graph-batch-sizes or --enforce-eager: rank {ranks.rank} captures {sizes}")


def log_loaded(loaded: LoadedModel, ops: Ops, *, duration_s: float, faster: str | None = None) -> None:
    """Say what the model computes in, and with what.

    Args:
        faster: What `describe_faster` says.
    """
    dtype = _name(loaded.model.dtype)
    weights = "+".join(sorted(each.value for each in loaded.packed_formats)) or dtype
    fields: dict[str, object] = {
        "weights": weights,
        "dtype": dtype,
        "backend": ops.name,
        "instructions": ops.instructions,
        "libraries": library_versions(ops.name),
    }
    fields["implementation"] = loaded.model.code or loaded.model.implementation
    fields |= {"threads": ops.num_threads, "seconds": round(duration_s, 1)}
    if faster is not None:
        fields["faster"] = faster
    logger.info("the model is loaded", extra=fields)


def _is_common(choice: str, ranks: Communicator, device: torch.device) -> bool:
    """Whether all ranks chose the same."""
    code = torch.tensor([[float(zlib.crc32(choice.encode()) % _NUM_CODES)]], device=device)
    return bool((ranks.all_gather(code, (1,) * ranks.size) == code).all())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_flag(plan: PlannedModel) -> str:
    cached = {tensor.dtype for layer in plan.model.kv_cache_spec.layers for tensor in layer}
    return f"--kv-cache-dtype {'/'.join(sorted(_KV_NAMES.get(dtype, _name(dtype)) for dtype in cached))}"


def _quantization_flag(plan: PlannedModel) -> str:
    quantization = plan.options.quantization
    return f"--quantization {'none' if quantization is None else quantization.value}"
