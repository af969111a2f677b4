"""RMSNorm and LayerNorm. One program normalises a whole row, or several heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a tile. Each thread then holds 16 of them at most.
_TILE_SIZE = 1024
_ELEMENTS_PER_WARP = 512
_MAX_WARPS = 16


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    output,
    token_stride,
    head_stride,
    num_heads,
    eps,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    mask = (heads < num_heads)[:, None] & (columns < WIDTH)[None, :]
    places = token * token_stride + heads[:, None] * head_stride + columns[None, :]
    values = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    mean_squares = tl.sum(values * values, axis=1) / WIDTH
    normed = values * tl.rsqrt(mean_squares + eps)[:, None] * scales[None, :]
    output_places = (token * num_heads + heads[:, None]) * WIDTH + columns[None, :]
    tl.store(output + output_places, normed.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    places = tl.program_id(0).to(tl.int64) * WIDTH + columns
    total = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + places, mask=mask, other=0.0).to(tl.float32)
    # The norm is that of the residual as it is stored.
    stored = total.to(residual.dtype.element_ty)
    tl.store(residual + places, stored, mask=mask)
    values = stored.to(tl.float32)
    scales = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + eps) * scales
    tl.store(x + places, normed.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_kernel(x, weight, bias, output, row_stride, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    values = tl.load(x + row * row_stride + columns, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, values - tl.sum(values, axis=0) / WIDTH, 0.0)
    variance = tl.sum(centred * centred, axis=0) / WIDTH
    scales = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    shifts = tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    normed = centred * tl.rsqrt(variance + eps) * scales + shifts
    tl.store(output + row * WIDTH + columns, normed.to(output.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Ops.rms_norm`.

    Args:
        x: [T, hidden] or [T, heads, D]; contiguous in the last dimension. Not written.
        weight: [hidden] or [D], contiguous.

    Returns:
        A new contiguous tensor of x's shape and dtype.

    Source: arXiv:1910.07467, equation 4.
    """
    heads = x if x.dim() == 3 else x.unsqueeze(1)
    num_tokens, num_heads, width = heads.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(width)
    rows = min(triton.next_power_of_2(num_heads), max(_TILE_SIZE // columns, 1))
    _rms_norm_kernel[(num_tokens, triton.cdiv(num_heads, rows))](
        heads,
        weight,
        output,
        heads.stride(0),
        heads.stride(1),
        num_heads,
        eps,
        WIDTH=width,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=choose_num_warps(rows * columns),
    )
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, num_warps: int | None = None) -> Tensor:
    """See `Ops.add_rms_norm`. Returns `x`, which holds the result.

    Args:
        x: [T, hidden], contiguous; written in place.
        residual: [T, hidden], contiguous, the same dtype; written in place.
        weight: [hidden], contiguous.
        num_warps: Of a row's program; None means as many as `choose_num_warps` says.

    Source: arXiv:1910.07467, equation 4.
    """
    num_tokens, width = x.shape
    columns = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(num_tokens,)](
        x, residual, weight, eps, WIDTH=width, COLUMNS=columns, num_warps=num_warps or choose_num_warps(columns)
    )
    return x


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `Ops.layer_norm`.

    Args:
        x: [T, D], contiguous in the last dimension. Not written.
        weight: [D], contiguous.
        bias: [D], contiguous.

    Returns:
        A new contiguous [T, D] of x's dtype.

    Source: arXiv:1607.06450, equation 4.
    """
    num_tokens, width = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(width)
    _layer_norm_kernel[(num_tokens,)](
        x, weight, bias, output, x.stride(0), eps, WIDTH=width, COLUMNS=columns, num_warps=choose_num_warps(columns)
    )
    return output


def choose_num_warps(tile_size: int) -> int:
    """Warps of a program that normalises `tile_size` elements, a power of two."""
    return min(max(tile_size // _ELEMENTS_PER_WARP, 1), _MAX_WARPS)
