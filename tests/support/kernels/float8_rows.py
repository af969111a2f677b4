"""What rows quantised to FP8 are, computed in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.ops.triton.products.fp8_rows import Fp8Encoding


def quantize(x: Tensor, group_size: int, encoding: Fp8Encoding) -> tuple[Tensor, Tensor]:
    """The codes and scales of `x` [T, K] in groups of `group_size` columns, the last maybe smaller."""
    parts = torch.split(x.float(), group_size, dim=1)
    scales = torch.stack([part.abs().amax(dim=1) / encoding.largest for part in parts], dim=1)
    scaled = [part / scale.clamp(min=1e-30)[:, None] for part, scale in zip(parts, scales.T, strict=True)]
    codes = torch.cat(scaled, dim=1).clamp(-encoding.largest, encoding.largest)
    return codes.to(encoding.dtype), scales


def rounded(x: Tensor, group_size: int, encoding: Fp8Encoding) -> Tensor:
    """The numbers that the codes of `x` [T, K] mean, in float64."""
    codes, scales = quantize(x, group_size, encoding)
    return codes.double() * scales.double().repeat_interleave(group_size, dim=1)[:, : x.shape[1]]
