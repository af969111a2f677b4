"""Stands in for AITER's activations. Source: AITER, csrc/kernels/activation_kernels.cu."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """silu_and_mul(out: torch.Tensor, input: torch.Tensor) -> None"""
    _check(out, input)
    gate, up = input.float().chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    """gelu_tanh_and_mul(out: torch.Tensor, input: torch.Tensor) -> None"""
    _check(out, input)
    gate, up = input.float().chunk(2, dim=-1)
    out.copy_(F.gelu(gate, approximate="tanh") * up)


def _check(out: Tensor, input: Tensor) -> None:
    if input.dtype not in (torch.float16, torch.bfloat16) or out.dtype != input.dtype:
        raise RuntimeError("the activations have fp16 and bf16")
    if not input.is_contiguous() or not out.is_contiguous() or 2 * out.shape[-1] != input.shape[-1]:
        raise RuntimeError(f"an activation reads {tuple(input.shape)} and writes {tuple(out.shape)}")
