"""The kernels that layers call; only this module selects a backend."""

from __future__ import annotations

from importlib import import_module

from services.worker.ops.arguments import (
    Activation,
    AttentionParams,
    DecodeRows,
    DeltaGates,
    DrawRows,
    HeadNorms,
    RopeRows,
    RunPlaces,
    RunRows,
    SlotColumns,
)
from services.worker.ops.experts import ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.matrices import Matrix
from services.worker.ops.protocol import EmbeddingKernel, LinearKernel, Ops, PerHeadKernel
from services.worker.ops.routing import ExpertGroups, RouterScore, RoutingRule

# Where each backend is made. Only the chosen one is imported: others may need libraries that are missing.
_BACKENDS = {
    "aiter": ("services.worker.ops.aiter_ops.load", "load_aiter_ops"),
    "cpu": ("services.worker.ops.cpu.backend", "CpuOps"),
    "native": ("services.worker.ops.native.backend", "load_native_ops"),
    "reference": ("services.worker.ops.reference.backend", "ReferenceOps"),
    "triton": ("services.worker.ops.triton.backend", "load_triton_ops"),
    "triton-exact": ("services.worker.ops.triton.exact_backend", "load_exact_ops"),
}

BACKEND_NAMES = ("cpu", "native", "reference")
"""The backends that compute everything, on any machine: where `native` cannot be built, `cpu` takes over."""

__all__ = [
    "BACKEND_NAMES",
    "Activation",
    "AttentionParams",
    "DecodeRows",
    "DeltaGates",
    "DrawRows",
    "EmbeddingKernel",
    "ExpertGroups",
    "ExpertWeights",
    "ExpertsKernel",
    "HeadNorms",
    "LinearKernel",
    "Matrix",
    "Ops",
    "PerHeadKernel",
    "RopeRows",
    "RouterScore",
    "RoutingRule",
    "RunPlaces",
    "RunRows",
    "SlotColumns",
    "SwigluClamp",
    "load_ops",
]


def load_ops(name: str, native_isa: str = "auto") -> Ops:
    """Create the backend called `name`: `BACKEND_NAMES`, `triton` or `triton-exact` on a GPU, or `aiter` on AMD's.

    A backend keeps buffers that serve one pass at a time: ranks that are threads of a process need one each.

    Args:
        native_isa: The instructions that `native` uses, an `Isa` or `auto` for the processor's best.

    Raises:
        ValueError: there is no such backend.
        DeviceError: the backend does not run on this machine.
        ImportError: the backend's libraries are missing.
    """
    if name not in _BACKENDS:
        raise ValueError(f"unknown ops backend {name!r}; available: {', '.join(_BACKENDS)}")
    module, maker = _BACKENDS[name]
    arguments = (native_isa,) if name == "native" else ()
    ops: Ops = getattr(import_module(module), maker)(*arguments)
    return ops
