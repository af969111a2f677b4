"""Products of the `reference` backend: each row alone, with a dense matrix."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from services.worker.ops.matrices import Matrix, dense
from services.worker.ops.protocol import LinearKernel, PerHeadKernel
from services.worker.ops.reference.elementwise import row_by_row


def prepare_linear(weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
    """Copy the dense matrix."""
    return partial(_linear, weight=dense(weight, dtype).clone(), bias=bias)


def prepare_per_head_linear(weight: Tensor) -> PerHeadKernel:
    """Copy the matrices."""
    return partial(_per_head_linear, weight=weight.clone(memory_format=torch.contiguous_format))


def _linear(x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = row_by_row(x, lambda row: torch.mv(weight, row))
    return output if bias is None else output.add_(bias)


def _per_head_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    return row_by_row(x, lambda row: torch.bmm(weight, row.contiguous().unsqueeze(-1)).squeeze(-1))
