"""Recurrent layers: a program walks a sequence's tokens, for some channels or for some columns of a head's state.

A token is computed in the same way wherever it is, so that its bits depend on nothing else, as the exact backend needs.
For long prompts the products of matrices in `ops/recurrent.py` are faster, where bits may differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.ops import recurrent
from services.worker.ops.arguments import DeltaGates

_CHANNELS = 256
# Columns of a state that a program has: 32 of 128 rows are 32 numbers for each of 128 threads.
_COLUMNS = 32
_NUM_WARPS = 4
# Elements of a program that multiplies by a gate.
_TILE = 1024
# A kernel must not be compiled again because these have other values, or begin at other addresses.
_PER_STEP = ("token_stride", "slot_stride", "gates_stride")
_ADDRESSES = ("slots", "starts")


@triton.jit(do_not_specialize=_PER_STEP, do_not_specialize_on_alignment=_ADDRESSES)
def _causal_conv_kernel(
    x,
    weight,
    state,
    output,
    slots,
    starts,
    token_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence = tl.program_id(0)
    start, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    kept = state + tl.load(slots + sequence) * slot_stride
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    for token in range(start, end):
        total = tl.zeros((COLUMNS,), tl.float32)
        for tap in tl.static_range(TAPS):
            # What lies before the step's first token is in the state.
            place = token - (TAPS - 1) + tap
            is_here = place >= start
            here = tl.load(x + place * token_stride + columns, mask=mask & is_here, other=0.0).to(tl.float32)
            before = place - start + (TAPS - 1)
            there = tl.load(kept + before * WIDTH + columns, mask=mask & (place < start), other=0.0).to(tl.float32)
            factor = tl.load(weight + tap * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
            total += tl.where(is_here, here, there) * factor
        tl.store(output + token * WIDTH + columns, (total * tl.sigmoid(total)).to(output.dtype.element_ty), mask=mask)
    # In this order, a value is read before it is overwritten: each comes from a later place.
    for tap in tl.static_range(TAPS - 1):
        place = end - (TAPS - 1) + tap
        is_here = place >= start
        here = tl.load(x + place * token_stride + columns, mask=mask & is_here, other=0.0)
        before = place - start + (TAPS - 1)
        there = tl.load(kept + before * WIDTH + columns, mask=mask & (place < start), other=0.0)
        tl.store(kept + tap * WIDTH + columns, tl.where(is_here, here, there), mask=mask)


@triton.jit
def _unit(values):
    return values * tl.rsqrt(tl.sum(values * values, axis=0) + 1e-6)


@triton.jit(do_not_specialize=_PER_STEP, do_not_specialize_on_alignment=_ADDRESSES)
def _delta_rule_kernel(
    qkv,
    gates,
    decays,
    biases,
    state,
    output,
    slots,
    starts,
    token_stride,
    gates_stride,
    slot_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    IS_TILED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = rows < KEY_DIM, columns < VALUE_DIM
    mask = row_mask[:, None] & column_mask[None, :]
    places = state + tl.load(slots + sequence) * slot_stride + head * KEY_DIM * VALUE_DIM
    places += rows[:, None] * VALUE_DIM + columns[None, :]
    memory = tl.load(places, mask=mask, other=0.0)
    decay, bias = tl.load(decays + head), tl.load(biases + head)
    key_head = head % KEY_HEADS if IS_TILED else head // (HEADS // KEY_HEADS)
    for token in range(start, end):
        ours = qkv + token * token_stride
        query = tl.load(ours + key_head * KEY_DIM + rows, mask=row_mask, other=0.0).to(tl.float32)
        key = tl.load(ours + (KEY_HEADS + key_head) * KEY_DIM + rows, mask=row_mask, other=0.0).to(tl.float32)
        value_place = ours + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + columns
        value = tl.load(value_place, mask=column_mask, other=0.0).to(tl.float32)
        beta = tl.sigmoid(tl.load(gates + token * gates_stride + head).to(tl.float32))
        a = tl.load(gates + token * gates_stride + HEADS + head).to(tl.float32) + bias
        # Linear above 20, as torch's.
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        query, key = _unit(query) * scale, _unit(key)
        memory *= tl.exp(decay * softplus)
        update = (value - tl.sum(memory * key[:, None], axis=0)) * beta
        memory += key[:, None] * update[None, :]
        result = tl.sum(memory * query[:, None], axis=0)
        result_place = output + (token * HEADS + head) * VALUE_DIM + columns
        tl.store(result_place, result.to(output.dtype.element_ty), mask=column_mask)
    tl.store(places, memory, mask=mask)


@triton.jit(do_not_specialize=("gate_stride",))
def _gated_norm_kernel(
    x, gate, weight, output, gate_stride, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    place = (token * HEADS + head) * WIDTH + columns
    values = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    gates = tl.load(gate + token * gate_stride + head * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps) * scales
    tl.store(output + place, (normed * gates * tl.sigmoid(gates)).to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("gate_stride",))
def _mul_sigmoid_kernel(x, gate, gate_stride, WIDTH: tl.constexpr, IS_SHARED: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    gate_columns = columns * 0 if IS_SHARED else columns
    gates = tl.load(gate + row * gate_stride + gate_columns, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(x + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + row * WIDTH + columns, (values * tl.sigmoid(gates)).to(x.dtype.element_ty), mask=mask)


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Walk decodes and their drafts; the chunks of prompts are computed by torch. See `RecurrentOps`."""
    return (exact_causal_conv if _walks(metadata) else recurrent.causal_conv)(x, weight, state, metadata)


def gated_delta_rule(
    qkv: Tensor, gates: Tensor, params: DeltaGates, state: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Walk decodes and their drafts; the chunks of prompts are computed by torch, in tiles. See `RecurrentOps`."""
    return (exact_delta_rule if _walks(metadata) else recurrent.gated_delta_rule)(qkv, gates, params, state, metadata)


def exact_causal_conv(x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Walk all tokens. See `RecurrentOps`."""
    assert metadata.state_slots is not None, "the model has states"
    num_taps, width = weight.shape
    output = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    columns = min(triton.next_power_of_2(width), _CHANNELS)
    _causal_conv_kernel[(len(metadata.query_lens), triton.cdiv(width, columns))](
        x,
        weight,
        state,
        output,
        metadata.state_slots,
        metadata.cu_seqlens_q,
        x.stride(0),
        state.stride(0),
        WIDTH=width,
        TAPS=num_taps,
        COLUMNS=columns,
    )
    return output


def exact_delta_rule(
    qkv: Tensor, gates: Tensor, params: DeltaGates, state: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Walk all tokens. See `RecurrentOps`."""
    assert metadata.state_slots is not None, "the model has states"
    _, num_heads, key_dim, value_dim = state.shape
    num_key_heads = (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim)
    output = torch.empty((len(qkv), num_heads, value_dim), dtype=qkv.dtype, device=qkv.device)
    columns = min(triton.next_power_of_2(value_dim), _COLUMNS)
    _delta_rule_kernel[(len(metadata.query_lens), num_heads, triton.cdiv(value_dim, columns))](
        qkv,
        gates,
        params.decay,
        params.bias,
        state,
        output,
        metadata.state_slots,
        metadata.cu_seqlens_q,
        qkv.stride(0),
        gates.stride(0),
        state.stride(0),
        key_dim**-0.5,
        KEY_HEADS=num_key_heads,
        HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        IS_TILED=params.is_tiled,
        ROWS=triton.next_power_of_2(key_dim),
        COLUMNS=columns,
        num_warps=_NUM_WARPS,
    )
    return output


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A program for each head of each token. See `RecurrentOps`."""
    num_tokens, num_heads, width = x.shape
    output = torch.empty_like(x)
    columns = triton.next_power_of_2(width)
    _gated_norm_kernel[(num_tokens, num_heads)](
        x, gate, weight, output, gate.stride(0), eps, HEADS=num_heads, WIDTH=width, COLUMNS=columns, num_warps=1
    )
    return output


def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply in place. See `Ops`."""
    num_tokens, width = x.shape
    columns = min(triton.next_power_of_2(width), _TILE)
    _mul_sigmoid_kernel[(num_tokens, triton.cdiv(width, columns))](
        x, gate, gate.stride(0), WIDTH=width, IS_SHARED=gate.shape[1] == 1, COLUMNS=columns
    )
    return x


def _walks(metadata: AttentionMetadata) -> bool:
    return metadata.max_query_len == 1 or not metadata.is_prefill
