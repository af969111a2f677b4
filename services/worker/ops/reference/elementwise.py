"""Norms and the activation of the `reference` backend: each row alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops import composed
from services.worker.ops.arguments import Activation


def row_by_row(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function` to a copy of each row."""
    # Each row is copied, because its offset in `x` determines its alignment, which may affect the choice of kernel.
    return torch.stack([function(row.clone()) for row in x])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each row, or each head of a row, alone."""
    rows = row_by_row(x.flatten(0, -2), lambda row: composed.rms_norm(row, weight, eps))
    return rows.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add, then `rms_norm`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise each row alone."""
    return row_by_row(x, lambda row: F.layer_norm(row, weight.shape, weight, bias, eps))


def act_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """Activate each row alone."""

    def activated(row: Tensor) -> Tensor:
        gate, up = row.chunk(2)
        return composed.activate(gate, activation) * up

    return row_by_row(x, activated)
