"""Recurrent layers of the `reference` backend: token by token, so that no bit depends on a sequence's division."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.ops import recurrent
from services.worker.ops.arguments import DeltaGates
from services.worker.ops.reference.elementwise import row_by_row


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Activate each token alone; products and sums are rounded alike everywhere."""
    return row_by_row(recurrent.convolve(x, weight, state, metadata), F.silu).to(x.dtype)


def gated_delta_rule(
    qkv: Tensor, gates: Tensor, params: DeltaGates, state: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Compute each token alone, from a copy of its sequence's state."""
    assert metadata.state_slots is not None, "the model has states"
    outputs, start = [], 0
    for number, length in enumerate(metadata.query_lens):
        slot = metadata.state_slots[number : number + 1]
        carried = state.index_select(0, slot)
        for token in range(start, start + length):
            # Copies, because an offset determines the alignment, which may affect the choice of kernel.
            ours = qkv[token : token + 1].clone(), gates[token : token + 1].clone()
            outputs.append(recurrent.delta_step(carried, recurrent.delta_rows(*ours, params, state)))
        state.index_copy_(0, slot, carried)
        start += length
    return torch.cat(outputs).to(qkv.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each token's heads alone."""
    rows = zip(x, gate, strict=True)
    return torch.stack([recurrent.gated_rms_norm(row.clone(), other.clone(), weight, eps) for row, other in rows])


def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply each row alone, in place."""
    for row, other in zip(x, gate, strict=True):
        row.copy_(recurrent.mul_sigmoid(row.clone(), other.clone()))
    return x
