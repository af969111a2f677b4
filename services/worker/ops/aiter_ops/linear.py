"""Matrix products by AITER's tuned choice among hipBLASLt, its own kernels and torch's."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from aiter.tuned_gemm import tgemm
from torch import Tensor

from services.worker.ops.matrices import Matrix, dense
from services.worker.ops.protocol import LinearKernel


def prepare_linear(weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
    """See `Ops.prepare_linear`. A tensor is kept, not copied: a device has no memory for two tied embeddings."""
    kept = dense(weight, dtype)
    if dtype == torch.float32:
        # Routers compute in it; AITER's kernels do not.
        return partial(F.linear, weight=kept, bias=bias)
    return partial(_linear, weight=kept, bias=bias)


def _linear(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = tgemm.mm(x.contiguous(), weight, bias=bias)
    return output
