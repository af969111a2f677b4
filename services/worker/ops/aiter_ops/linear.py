"""Matrix products by AITER's tuned choice among hipBLASLt, its own kernels and torch's; packed matrices by our kernels.

Models compute in bfloat16 or float16.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from aiter.tuned_gemm import tgemm
from torch import Tensor

from services.worker.device import DeviceError
from services.worker.ops.matrices import Matrix
from services.worker.ops.protocol import EmbeddingKernel, LinearKernel
from services.worker.ops.triton import prepare
from services.worker.ops.triton.state import TritonState

_DTYPES = (torch.bfloat16, torch.float16)


def prepare_linear(state: TritonState, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
    """Keep the matrix, without a copy: a device has no memory for two tied embeddings."""
    if not isinstance(weight, Tensor):
        return prepare.prepare_linear(state, weight, bias, dtype)
    # Routers compute in float32; AITER's kernels do not.
    multiply = F.linear if weight.dtype == torch.float32 else _linear
    return partial(multiply, weight=weight, bias=bias)


def prepare_embedding(weight: Matrix, dtype: torch.dtype) -> EmbeddingKernel:
    """Keep the matrix.

    Raises:
        DeviceError: AITER has no kernels for `dtype`.
    """
    # Every model has one, in the dtype of all its activations.
    if dtype not in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise DeviceError(f"--dtype {name}: the backend aiter has only kernels for bfloat16 and float16")
    return prepare.prepare_embedding(weight, dtype)


def _linear(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = tgemm.mm(x.contiguous(), weight, bias=bias)
    return output
