"""Matrix products by AITER's tuned choice among hipBLASLt, its own kernels and torch's."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from aiter.tuned_gemm import tgemm
from torch import Tensor

from services.worker.ops.protocol import LinearKernel


def prepare_linear(weight: Tensor, bias: Tensor | None) -> LinearKernel:
    """See `Ops.prepare_linear`. The weight is kept, not copied: a device has no memory for two tied embeddings."""
    # Routers compute in float32; AITER's kernels do not.
    multiply = F.linear if weight.dtype == torch.float32 else _linear
    return partial(multiply, weight=weight, bias=bias)


def _linear(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = tgemm.mm(x.contiguous(), weight, bias=bias)
    return output
