"""Norms, activation, rotation and the KV write, by AITER's kernels for one tensor at a time."""

from __future__ import annotations

import torch
from aiter import reshape_and_cache_flash, rmsnorm2d_fwd, rmsnorm2d_fwd_with_add, rope_cached_positions_fwd_inplace
from aiter import silu_and_mul as aiter_silu_and_mul
from torch import Tensor

from services.worker.ops.arguments import RopeRows

# AITER's numbers for the pairs of columns.
_NEOX, _GPT_J = 0, 1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.rms_norm`; bfloat16 or float16."""
    # AITER reads one row after the other, at one stride: heads and slices are copied first.
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    normed: Tensor = rmsnorm2d_fwd(rows, weight, eps)
    return normed.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.add_rms_norm`; bfloat16 or float16."""
    output = torch.empty_like(x)
    # The sum may be stored over its addend: a block of threads reads a row's tile before it stores it.
    rmsnorm2d_fwd_with_add(output, x, residual, residual, weight, eps)
    return output


def silu_and_mul(x: Tensor) -> Tensor:
    """See `Ops.silu_and_mul`; `x` is not written."""
    output = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)
    aiter_silu_and_mul(output, x)
    return output


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


def write_kv(key: Tensor, value: Tensor, cache: tuple[Tensor, ...], slot_mapping: Tensor, unit_scale: Tensor) -> None:
    """See `Ops.write_kv`.

    Args:
        key: [T, K, D], each token's heads contiguous.
        value: Likewise.
        cache: Keys and values, each [num_blocks, block_size, K, D].
        slot_mapping: [T] int64.
        unit_scale: [1] float32: 1.
    """
    reshape_and_cache_flash(
        key, value, cache[0], cache[1], slot_mapping, kv_cache_dtype="auto", k_scale=unit_scale, v_scale=unit_scale
    )
