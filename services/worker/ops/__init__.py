"""The kernels that layers call, and the one place that selects a backend."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.ops.cpu_ops import CpuOps
from services.worker.ops.experts import ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.protocol import AttentionParams, LinearKernel, Ops, PerHeadKernel, RopeRows
from services.worker.ops.reference_ops import ReferenceOps
from services.worker.ops.routing import ExpertGroups, RouterScore, RoutingRule

_BACKENDS: dict[str, Callable[[], Ops]] = {"cpu": CpuOps, "reference": ReferenceOps}

BACKEND_NAMES = tuple(_BACKENDS)

__all__ = [
    "BACKEND_NAMES",
    "AttentionParams",
    "ExpertGroups",
    "ExpertWeights",
    "ExpertsKernel",
    "LinearKernel",
    "Ops",
    "PerHeadKernel",
    "RopeRows",
    "RouterScore",
    "RoutingRule",
    "SwigluClamp",
    "load_ops",
]


def load_ops(name: str) -> Ops:
    """Create the backend called `name`, one of `BACKEND_NAMES`.

    Raises:
        ValueError: there is no such backend.
    """
    if name not in _BACKENDS:
        raise ValueError(f"unknown ops backend {name!r}; available: {', '.join(BACKEND_NAMES)}")
    return _BACKENDS[name]()
