"""Experts, for all backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.matrices import Matrix

# Maps (x [T, hidden], expert_ids [T, k] int32, expert_weights [T, k] float32) to a new [T, hidden]. The number of
# experts stands for one that is elsewhere, which adds nothing.
ExpertsKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
# `Ops.prepare_linear` for one dtype.
PrepareLinear = Callable[[Matrix, Tensor | None], Callable[[Tensor], Tensor]]


@dataclass(frozen=True, slots=True)
class SwigluClamp:
    """The gated activation of gpt-oss: `(up + 1) * gate * sigmoid(alpha * gate)`.

    The gate is clamped to at most `limit` and up to ± `limit` first. Source: arXiv:2508.10925, section 2.2.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's gated network of inner size I; tensors are in the model's dtype, contiguous."""

    gate_up: Matrix
    """[2 I, hidden]: the gate's rows, then up's."""
    down: Matrix
    """[hidden, I]."""
    gate_up_bias: Tensor | None = None
    """[2 I]."""
    down_bias: Tensor | None = None
    """[hidden]."""


class Expert:
    """One expert, as a backend runs it."""

    def __init__(self, weights: ExpertWeights, clamp: SwigluClamp | None, prepare_linear: PrepareLinear) -> None:
        self._gate_up = prepare_linear(weights.gate_up, weights.gate_up_bias)
        self._down = prepare_linear(weights.down, weights.down_bias)
        self._clamp = clamp

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to a new [T, hidden]."""
        return self._down(gate_and_up(self._gate_up(x), self._clamp))


def gate_and_up(projected: Tensor, clamp: SwigluClamp | None) -> Tensor:
    """Apply the activation to `projected` [T, 2 I] = gate | up, whose contents are lost; returns [T, I]."""
    gate, up = projected.chunk(2, dim=-1)
    if clamp is None:
        return F.silu(gate).mul_(up)
    gate.clamp_(max=clamp.limit)
    up.clamp_(min=-clamp.limit, max=clamp.limit)
    return (gate * clamp.alpha).sigmoid_().mul_(gate).mul_(up.add_(1))
