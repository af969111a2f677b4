"""The gated feed-forward network."""

from __future__ import annotations

from torch import Tensor

from services.worker.layers.linear import Linear
from services.worker.ops import Ops


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`, gate and up in one product. Source: arXiv:2002.05202, section 2."""

    def __init__(self, ops: Ops, gate_up: Linear, down: Linear) -> None:
        self._ops = ops
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to a new [T, hidden]."""
        return self._down(self._ops.silu_and_mul(self._gate_up(x)))
