"""Norms and the activation of the `cpu` backend."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from services.worker.ops import composed
from services.worker.ops.arguments import Activation


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add, then call torch's."""
    residual.add_(x)
    return composed.rms_norm(residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Call torch's."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def act_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """Activate, then multiply in place."""
    gate, up = x.chunk(2, dim=-1)
    return composed.activate(gate, activation).mul_(up)
