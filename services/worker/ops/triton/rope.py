"""Rotary position embedding, in place, with positions looked up in whole tables."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.worker.ops.arguments import RopeRows

# Pairs of columns in a tile. Each thread then holds 8 of them at most.
_TILE_SIZE = 1024
_PAIRS_PER_WARP = 256


@triton.jit
def load_rotation(cos, sin, positions, token, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """The cosines and sines [PAIRS] float32 of a token's position; 0 after the first HALF."""
    pairs = tl.arange(0, PAIRS)
    place = tl.load(positions + token) * HALF + pairs
    return tl.load(cos + place, mask=pairs < HALF, other=0.0), tl.load(sin + place, mask=pairs < HALF, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rope_kernel(
    heads,
    cos,
    sin,
    positions,
    token_stride,
    head_stride,
    num_heads,
    HALF: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cosines, sines = load_rotation(cos, sin, positions, token, HALF, PAIRS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    pairs = tl.arange(0, PAIRS)
    mask = (rows < num_heads)[:, None] & (pairs < HALF)[None, :]
    row_places = token * token_stride + rows[:, None] * head_stride
    first_places = heads + row_places + (2 * pairs if IS_INTERLEAVED else pairs)[None, :]
    second_places = first_places + (1 if IS_INTERLEAVED else HALF)
    first = tl.load(first_places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_places, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = heads.dtype.element_ty
    tl.store(first_places, (first * cosines[None, :] - second * sines[None, :]).to(dtype), mask=mask)
    tl.store(second_places, (second * cosines[None, :] + first * sines[None, :]).to(dtype), mask=mask)


def prepare_rope(cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
    """Keep the whole tables."""
    positions = torch.empty(0, dtype=torch.int64, device=cos.device)
    return RopeRows(cos.contiguous(), sin.contiguous(), positions, is_interleaved)


def select_rope(tables: RopeRows, positions: Tensor) -> RopeRows:
    """Keep the whole tables, which kernels read at the step's positions."""
    return RopeRows(tables.cos, tables.sin, positions, tables.is_interleaved)


def rope(query_key: Tensor, rows: RopeRows) -> None:
    """See `Ops.rope`.

    Args:
        query_key: [T, heads, D], contiguous in the last dimension; written in place.
        rows: Whole tables [max_positions, rotary_dim / 2] float32, contiguous, and `positions` [T] int64, each below
            max_positions.

    Source: arXiv:2104.09864, equation 34.
    """
    num_tokens, num_heads, _ = query_key.shape
    half = rows.cos.shape[1]
    pairs = triton.next_power_of_2(half)
    num_rows = min(triton.next_power_of_2(num_heads), max(_TILE_SIZE // pairs, 1))
    _rope_kernel[(num_tokens, triton.cdiv(num_heads, num_rows))](
        query_key,
        rows.cos,
        rows.sin,
        rows.positions,
        query_key.stride(0),
        query_key.stride(1),
        num_heads,
        HALF=half,
        IS_INTERLEAVED=rows.is_interleaved,
        ROWS=num_rows,
        PAIRS=pairs,
        num_warps=max(num_rows * pairs // _PAIRS_PER_WARP, 1),
    )
