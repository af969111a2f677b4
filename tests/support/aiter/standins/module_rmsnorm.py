"""Stands in for AITER's RMSNorm. Source: AITER, csrc/py_itfs_ck/rmsnorm_ck_kernels.cu."""

from __future__ import annotations

import torch
from torch import Tensor


def rmsnorm2d_fwd(input: Tensor, weight: Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0) -> Tensor:
    """rmsnorm2d_fwd(input: torch.Tensor, weight: torch.Tensor, epsilon: typing.SupportsFloat, use_model_sensitive_rmsnorm: typing.SupportsInt = 0) -> torch.Tensor"""
    _check(input, weight)
    return _normed(input.float(), weight, epsilon).to(input.dtype)


def rmsnorm2d_fwd_with_add(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    epsilon: float,
    use_model_sensitive_rmsnorm: int = 0,
) -> None:
    """rmsnorm2d_fwd_with_add(out: torch.Tensor, input: torch.Tensor, residual_in: torch.Tensor, residual_out: torch.Tensor, weight: torch.Tensor, epsilon: typing.SupportsFloat, use_model_sensitive_rmsnorm: typing.SupportsInt = 0) -> None"""
    for each in (out, input, residual_in, residual_out):
        _check(each, weight)
    total = input.float() + residual_in.float()
    residual_out.copy_(total)
    out.copy_(_normed(total, weight, epsilon))


def _check(rows: Tensor, weight: Tensor) -> None:
    if rows.dtype not in (torch.float16, torch.bfloat16) or weight.dtype != rows.dtype:
        raise RuntimeError("ck rmsnorm2d only support fp16 and bf16 data type")
    if rows.dim() != 2 or not rows.is_contiguous() or weight.shape != rows.shape[1:]:
        raise RuntimeError(f"rmsnorm2d reads rows of one stride, not {tuple(rows.shape)} {rows.stride()}")


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()
