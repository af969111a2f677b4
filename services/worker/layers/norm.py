"""RMSNorm and LayerNorm."""

from __future__ import annotations

from torch import Tensor

from services.worker.ops import Ops


class RmsNorm:
    """Root-mean-square norm, with `Ops.rms_norm`."""

    def __init__(self, ops: Ops, weight: Tensor, eps: float) -> None:
        """Copy `weight` [hidden], or [D] for a norm of heads."""
        self._ops = ops
        self._weight = weight.clone()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] or [T, heads, D] to a new tensor of its shape."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to `residual` in place and return the norm of the sum; `x`'s contents are lost."""
        return self._ops.add_rms_norm(x, residual, self._weight, self._eps)


class LayerNorm:
    """Norm of mean and variance, with `Ops.layer_norm`."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor, eps: float) -> None:
        """Copy `weight` and `bias`, both [D]."""
        self._ops = ops
        self._weight = weight.clone()
        self._bias = bias.clone()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] to a new tensor of its shape."""
        return self._ops.layer_norm(x, self._weight, self._bias, self._eps)
