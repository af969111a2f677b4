"""Products of the `cpu` backend: oneDNN packs weights once at load."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.matrices import Matrix, dense
from services.worker.ops.protocol import LinearKernel

# Private to torch, so it may disappear; `F.linear` is the fallback.
_HAS_PACKED_LINEAR = all(hasattr(torch.ops.mkldnn, op) for op in ("_reorder_linear_weight", "_linear_pointwise"))


def prepare_linear(weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
    """Pack the dense matrix, or copy it where oneDNN has no kernels."""
    weight = dense(weight, dtype)
    if not _can_pack(dtype):
        return partial(F.linear, weight=weight.clone(), bias=bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return partial(_packed_linear, packed=packed, bias=bias)


def packing() -> str:
    """What packs the weights."""
    return "onednn" if _HAS_PACKED_LINEAR else "plain"


def _can_pack(dtype: torch.dtype) -> bool:
    if not _HAS_PACKED_LINEAR:
        return False
    # oneDNN refuses bfloat16 on processors without instructions for it.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed_linear(x: Tensor, *, packed: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return output
