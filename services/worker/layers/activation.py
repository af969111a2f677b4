"""The gated feed-forward network."""

from __future__ import annotations

from torch import Tensor

from services.worker.layers.linear import Linear
from services.worker.ops import Activation, Ops


class GatedMlp:
    """`down(activation(gate(x)) * up(x))`, gate and up in one product. Source: arXiv:2002.05202, section 2."""

    def __init__(self, ops: Ops, gate_up: Linear, down: Linear, activation: Activation = Activation.SILU) -> None:
        self._ops = ops
        self._activation = activation
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to a new [T, hidden]."""
        return self._down(self._ops.act_and_mul(self._gate_up(x), self._activation))
