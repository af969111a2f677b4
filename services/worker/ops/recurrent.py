"""Recurrent layers with torch's functions, for backends without kernels of their own; see `RecurrentOps`.

Decodes are computed together, token by token; a prompt's chunk in tiles of tokens, between which the state is carried.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.ops.arguments import DeltaGates

# Tokens that are computed together with products of matrices; their cost for each token grows with it.
_TILE = 64
_NORM_EPS = 1e-6


class DeltaRows(NamedTuple):
    """What the gated delta rule reads of each token, in float32; query and key are normalised and scaled."""

    query: Tensor  # [T, V, D]
    key: Tensor  # [T, V, D]
    value: Tensor  # [T, V, E]
    log_decay: Tensor  # [T, V], g
    beta: Tensor  # [T, V]

    def part(self, start: int, stop: int) -> DeltaRows:
        """Some tokens'."""
        return DeltaRows(*(rows[start:stop] for rows in self))


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Convolve the leading sequences of one token together, each other one alone."""
    return F.silu(convolve(x, weight, state, metadata)).to(x.dtype)


def convolve(x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata) -> Tensor:
    """The sums before the activation, [T, C] float32; a token's bits do not depend on its batch."""
    slots = _slots(metadata)
    outputs = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    num_single = num_leading_singles(metadata)
    if num_single:
        ours = slots[:num_single]
        window = torch.cat((state.index_select(0, ours), x[:num_single, None]), dim=1)
        state.index_copy_(0, ours, window[:, 1:])
        _sum_taps(window.transpose(0, 1), weight, outputs[:num_single])
    start = num_single
    for number, length in enumerate(metadata.query_lens[num_single:], start=num_single):
        slot, stop = slots[number : number + 1], start + length
        padded = torch.cat((state.index_select(0, slot)[0], x[start:stop]))
        state.index_copy_(0, slot, padded[None, length:])
        _sum_taps(padded.unfold(0, length, 1).movedim(-1, 1), weight, outputs[start:stop])
        start = stop
    return outputs


def gated_delta_rule(
    qkv: Tensor, gates: Tensor, params: DeltaGates, state: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Compute the leading sequences of one token together, each other one alone, in tiles."""
    rows = delta_rows(qkv, gates, params, state)
    slots = _slots(metadata)
    outputs = torch.empty_like(rows.value)
    num_single = num_leading_singles(metadata)
    if num_single:
        ours = slots[:num_single]
        states = state.index_select(0, ours)
        outputs[:num_single] = delta_step(states, rows.part(0, num_single))
        state.index_copy_(0, ours, states)
    start = num_single
    for number, length in enumerate(metadata.query_lens[num_single:], start=num_single):
        slot = slots[number : number + 1]
        carried, stop = state.index_select(0, slot), start + length
        for first in range(start, stop, _TILE):
            last = min(first + _TILE, stop)
            outputs[first:last] = _delta_tile(carried[0], rows.part(first, last))
        state.index_copy_(0, slot, carried)
        start = stop
    return outputs.to(qkv.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Call torch's functions in float32."""
    normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return normed.mul_(F.silu(gate.float())).to(x.dtype)


def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply in place, in float32."""
    return x.copy_(x.float() * gate.float().sigmoid())


def num_leading_singles(metadata: AttentionMetadata) -> int:
    """How many sequences before the first one with several tokens have one: a step's decodes are its first."""
    if metadata.max_query_len == 1:
        return len(metadata.query_lens)
    return next(number for number, length in enumerate(metadata.query_lens) if length != 1)


def delta_rows(qkv: Tensor, gates: Tensor, params: DeltaGates, state: Tensor) -> DeltaRows:
    """Split, repeat, normalise and scale; and both gates."""
    _, num_value_heads, key_dim, value_dim = state.shape
    value_width = num_value_heads * value_dim
    key_width = (qkv.shape[1] - value_width) // 2
    parts = torch.split(qkv.float(), [key_width, key_width, value_width], dim=1)
    repeats, num_tokens = num_value_heads * key_dim // key_width, len(qkv)
    query, key = (_unit(each.reshape(num_tokens, -1, key_dim)) for each in parts[:2])
    query, key = (
        each.repeat(1, repeats, 1) if params.is_tiled else each.repeat_interleave(repeats, dim=1)
        for each in (query, key)
    )
    value = parts[2].reshape(num_tokens, num_value_heads, value_dim)
    b, a = torch.split(gates.float(), num_value_heads, dim=1)
    log_decay = params.decay * F.softplus(a + params.bias)
    return DeltaRows(query * key_dim**-0.5, key, value, log_decay, b.sigmoid())


def delta_step(states: Tensor, rows: DeltaRows) -> Tensor:
    """One token of each of n sequences, [n, V, E]; `states` [n, V, D, E] is written in place."""
    states.mul_(rows.log_decay.exp()[..., None, None])
    known = torch.matmul(rows.key[:, :, None], states)[:, :, 0]
    update = (rows.value - known) * rows.beta[..., None]
    states.add_(rows.key[..., None] * update[:, :, None])
    return torch.matmul(rows.query[:, :, None], states)[:, :, 0]


def _delta_tile(state: Tensor, rows: DeltaRows) -> Tensor:
    """A tile's tokens, [n, V, E]; `state` [V, D, E] is written in place.

    Source: arXiv:2412.06464, section 3.3, the chunkwise form, as a triangular system instead of its inverse.
    """
    query, key, value = (each.transpose(0, 1) for each in rows[:3])
    log_decay, beta = (each.transpose(0, 1) for each in rows[3:])
    total = log_decay.cumsum(1)
    later = torch.ones(len(rows.beta), len(rows.beta), dtype=torch.bool, device=state.device).triu(1)
    between = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp()
    since_start = total.exp()[..., None]
    weighted = key * beta[..., None]
    system = (weighted @ key.mT) * between
    known = (weighted * since_start) @ state
    update: Tensor = torch.linalg.solve_triangular(
        system, value * beta[..., None] - known, upper=False, unitriangular=True
    )
    outputs = (query * since_start) @ state + ((query @ key.mT) * between) @ update
    until_end = (total[:, -1:] - total).exp()[..., None]
    state.mul_(since_start[:, -1:]).add_((key * until_end).mT @ update)
    return outputs.transpose(0, 1)


def _slots(metadata: AttentionMetadata) -> Tensor:
    assert metadata.state_slots is not None, "the model has states"
    return metadata.state_slots


def _sum_taps(windows: Tensor, weight: Tensor, outputs: Tensor) -> None:
    """Sum [k, n, C] over k, in the order of the taps, into `outputs` [n, C] float32."""
    torch.mul(windows[0].float(), weight[0].float(), out=outputs)
    for values, tap in zip(windows[1:], weight[1:], strict=True):
        # Not fused, so that a product is rounded alike wherever it lies.
        outputs += values.float() * tap.float()


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + _NORM_EPS)
