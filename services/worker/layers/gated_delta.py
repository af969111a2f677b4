"""The gated delta rule: attention whose context is a state of fixed size, instead of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, get_forward_context
from services.worker.layers.linear import Linear
from services.worker.ops import DeltaGates, Ops, RopeRows


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Gated DeltaNet (arXiv:2412.06464) with its projections and its convolution."""

    ops: Ops
    layer: int
    """Index in the states."""
    _: KW_ONLY
    qkvz: Linear
    """Queries, keys, values and output gates, fused in this order."""
    gates: Linear
    """[T, hidden] to b and a of each value head, [T, 2 V]."""
    params: DeltaGates
    conv: Tensor
    """[k, C], over queries, keys and values."""
    norm: Tensor
    """[E], of each value head's result."""
    eps: float
    output: Callable[[Tensor], Tensor]
    """[T, V E] to [T, hidden]."""

    def __call__(self, x: Tensor, _: RopeRows) -> Tensor:
        """[T, hidden] to a new [T, hidden]; writes the states. Positions have no effect."""
        qkvz = self.qkvz(x)
        mixed, z = qkvz.tensor_split((self.conv.shape[1],), dim=1)
        read = get_forward_context().take_in(self.layer, (mixed, self.gates(x)), self._take_in)
        normed = self.ops.gated_rms_norm(read, z.view(read.shape), self.norm, self.eps)
        return self.output(normed.view(len(x), -1))

    def _take_in(self, inputs: tuple[Tensor, ...], states: tuple[Tensor, ...], metadata: AttentionMetadata) -> Tensor:
        """See `TakeIn`: queries, keys and values [T, C] and gates [T, 2 V] to [T, V, E]."""
        (qkv, gates), (conv_state, state) = inputs, states
        mixed = self.ops.causal_conv(qkv, self.conv, conv_state, metadata)
        return self.ops.gated_delta_rule(mixed, gates, self.params, state, metadata)
