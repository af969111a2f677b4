"""Norms, activation and rotation, by AITER's kernels for one tensor at a time."""

from __future__ import annotations

import torch
from aiter import (
    gelu_tanh_and_mul,
    rmsnorm2d_fwd,
    rmsnorm2d_fwd_with_add,
    rope_cached_positions_fwd_inplace,
    silu_and_mul,
)
from torch import Tensor

from services.worker.ops.arguments import Activation, RopeRows
from services.worker.ops.triton import norm
from services.worker.ops.triton import rope as rotary

# AITER's numbers for the pairs of columns.
_NEOX, _GPT_J = 0, 1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.rms_norm`; bfloat16 or float16."""
    if weight.dtype != x.dtype:
        # AITER reads the weight in the dtype of the rows.
        return norm.rms_norm(x, weight, eps)
    # AITER reads one row after the other, at one stride: heads and slices are copied first.
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    normed: Tensor = rmsnorm2d_fwd(rows, weight, eps)
    return normed.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.add_rms_norm`; bfloat16 or float16."""
    if weight.dtype != x.dtype:
        return norm.add_rms_norm(x, residual, weight, eps)
    output = torch.empty_like(x)
    # The sum may be stored over its addend: a block of threads reads a row's tile before it stores it.
    rmsnorm2d_fwd_with_add(output, x, residual, residual, weight, eps)
    return output


def act_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """See `Ops.act_and_mul`; `x` is not written."""
    output = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)
    if activation is Activation.SILU:
        silu_and_mul(output, x)
    else:
        gelu_tanh_and_mul(output, x)
    return output


def prepare_rope(cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
    """Keep the whole tables, in AITER's four dimensions."""
    tables = rotary.prepare_rope(cos, sin, is_interleaved=is_interleaved)
    return RopeRows(tables.cos[:, None, None], tables.sin[:, None, None], tables.positions, is_interleaved)


def rope(query_key: Tensor, rows: RopeRows) -> None:
    """See `Ops.rope`.

    Args:
        query_key: [T, heads, D]; written in place.
        rows: Whole tables [max_positions, 1, 1, rotary_dim / 2] float32 and `positions` [T] int64.
    """
    # Tokens are AITER's first dimension: its second one is a dimension of the grid that is limited to 65535.
    rope_cached_positions_fwd_inplace(
        query_key.unsqueeze(1),
        rows.cos,
        rows.sin,
        rows.positions.unsqueeze(1),
        rotate_style=_GPT_J if rows.is_interleaved else _NEOX,
        # The tables have one column per pair, and the columns that are not rotated come last.
        reuse_freqs_front_part=True,
        nope_first=False,
    )
