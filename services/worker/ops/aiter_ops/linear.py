"""Matrix products by AITER's tuned choice among hipBLASLt, its own kernels and torch's."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from aiter.tuned_gemm import tgemm
from torch import Tensor

from services.worker.ops.protocol import LinearKernel, PerHeadKernel


def prepare_linear(weight: Tensor, bias: Tensor | None) -> LinearKernel:
    """See `Ops.prepare_linear`. The weight is kept, not copied: a device has no memory for two tied embeddings."""
    # Routers compute in float32; AITER's kernels do not.
    multiply = F.linear if weight.dtype == torch.float32 else _linear
    return partial(multiply, weight=weight, bias=bias)


def prepare_per_head_linear(weight: Tensor) -> PerHeadKernel:
    """See `Ops.prepare_per_head_linear`."""
    return partial(_per_head_linear, weight=weight.transpose(1, 2).contiguous())


def _linear(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = tgemm.mm(x.contiguous(), weight, bias=bias)
    return output


def _per_head_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
