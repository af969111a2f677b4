"""Matrix products by AITER's tuned choice among hipBLASLt, its own kernels and torch's; packed matrices by our kernels.

Models compute in bfloat16 or float16.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from aiter.tuned_gemm import tgemm
from torch import Tensor

from services.worker.ops.matrices import Matrix
from services.worker.ops.protocol import LinearKernel
from services.worker.ops.triton import prepare
from services.worker.ops.triton.state import TritonState


def prepare_linear(state: TritonState, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
    """Keep the matrix, without a copy: a device has no memory for two tied embeddings."""
    if not isinstance(weight, Tensor):
        return prepare.prepare_linear(state, weight, bias, dtype)
    # Routers compute in float32; AITER's kernels do not.
    multiply = F.linear if weight.dtype == torch.float32 else _linear
    return partial(multiply, weight=weight, bias=bias)


def _linear(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = tgemm.mm(x.contiguous(), weight, bias=bias)
    return output
