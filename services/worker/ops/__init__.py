"""The kernels that layers call; only this module selects a backend."""

from __future__ import annotations

from collections.abc import Callable

from services.worker.ops.cpu_ops import CpuOps
from services.worker.ops.experts import ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.protocol import (
    AttentionParams,
    DrawRows,
    HeadNorms,
    LinearKernel,
    Ops,
    PerHeadKernel,
    RopeRows,
)
from services.worker.ops.reference_ops import ReferenceOps
from services.worker.ops.routing import ExpertGroups, RouterScore, RoutingRule

_BACKENDS: dict[str, Callable[[], Ops]] = {"cpu": CpuOps, "reference": ReferenceOps}

BACKEND_NAMES = tuple(_BACKENDS)

__all__ = [
    "BACKEND_NAMES",
    "AttentionParams",
    "DrawRows",
    "ExpertGroups",
    "ExpertWeights",
    "ExpertsKernel",
    "HeadNorms",
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
    """Create a backend.

    Raises:
        ValueError: `name` is not in `BACKEND_NAMES`.
    """
    if name not in _BACKENDS:
        raise ValueError(f"unknown ops backend {name!r}; available: {', '.join(BACKEND_NAMES)}")
    return _BACKENDS[name]()
