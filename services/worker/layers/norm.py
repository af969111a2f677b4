"""Root mean square normalisation."""

from __future__ import annotations

from torch import Tensor

from services.worker.ops import Ops


class RmsNorm:
    """See `Ops.rms_norm`."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        """Keep a copy of `weight` [hidden]."""
        self._ops = ops
        self._weight = weight.clone()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of `x` [T, hidden], as a new tensor."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual += x` in place, and the norm of that; `x`'s contents are lost."""
        return self._ops.add_rms_norm(x, residual, self._weight, self._eps)
