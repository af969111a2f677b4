"""Stands in for AITER's rotation by positions. Source: AITER, csrc/kernels/rope/pos_fwd_kernels.cu."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_cached_positions_fwd_impl(
    output: Tensor,
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    """rope_cached_positions_fwd_impl(arg0: torch.Tensor, arg1: torch.Tensor, arg2: torch.Tensor, arg3: torch.Tensor, arg4: torch.Tensor, arg5: typing.SupportsInt, arg6: bool, arg7: bool) -> None"""
    if positions.dtype != torch.int64 or positions.dim() != 2 or positions.stride(1) != 1:
        raise RuntimeError(f"positions are [s, b] of int64, not {positions.dtype} {positions.stride()}")
    if input.dim() != 4 or cos.dim() != 4 or positions.shape != input.shape[:2] or input.stride(3) != 1:
        raise RuntimeError(f"rope reads [s, b, h, d], not {tuple(input.shape)} with {tuple(cos.shape)}")
    if not reuse_freqs_front_part or nope_first:
        raise RuntimeError("tables have half of the rotated columns, which come first")
    half = cos.shape[3]
    cosines, sines = cos[positions, 0, 0].unsqueeze(2).float(), sin[positions, 0, 0].unsqueeze(2).float()
    turned = input[..., : 2 * half].float()
    if rotate_style == 0:
        first, second = turned[..., :half], turned[..., half:]
    elif rotate_style == 1:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        raise RuntimeError(f"rope does't support rotate type {rotate_style}")
    rotated = first * cosines - second * sines, second * cosines + first * sines
    joined = torch.cat(rotated, dim=-1) if rotate_style == 0 else torch.stack(rotated, dim=-1).flatten(-2)
    output[..., : 2 * half] = joined.to(output.dtype)
