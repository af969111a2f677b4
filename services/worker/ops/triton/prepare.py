"""Products of the backends with Triton's kernels, prepared at load: packed matrices by our own, others by torch's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops.experts import ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.matrices import BlockMatrix, Matrix
from services.worker.ops.protocol import EmbeddingKernel, LinearKernel, Ops
from services.worker.ops.triton.products.experts import TritonExperts
from services.worker.ops.triton.products.linear import PackedEmbedding, PackedLinear
from services.worker.ops.triton.state import TritonState


def prepare_linear(state: TritonState, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
    """Keep the matrix."""
    # Without a copy: a tied embedding is also the head, and a device has no memory for two.
    if isinstance(weight, Tensor):
        return partial(F.linear, weight=weight, bias=bias)
    return PackedLinear(weight, bias, dtype, encoding=state.encoding)


def prepare_exact_linear(state: TritonState, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
    """Keep the matrix, for our own kernel in any case."""
    return PackedLinear(weight, bias, dtype, is_exact=True, encoding=state.encoding)


def prepare_embedding(weight: Matrix, dtype: torch.dtype) -> EmbeddingKernel:
    """Keep the matrix."""
    return partial(F.embedding, weight=weight) if isinstance(weight, Tensor) else PackedEmbedding(weight, dtype)


def prepare_tied(ops: Ops, weight: Matrix, dtype: torch.dtype) -> tuple[EmbeddingKernel, LinearKernel]:
    """Keep the matrix once."""
    if isinstance(weight, BlockMatrix):
        # Each would make its own copy.
        weight = weight.to_integers()
    return ops.prepare_embedding(weight, dtype), ops.prepare_head(weight, dtype)


def prepare_experts(
    state: TritonState, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
) -> ExpertsKernel:
    """Join the experts' matrices."""
    return TritonExperts(experts, clamp, dtype, encoding=state.encoding)


def prepare_exact_experts(
    state: TritonState, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
) -> ExpertsKernel:
    """Join the experts' matrices, for tiles of one size."""
    return TritonExperts(experts, clamp, dtype, is_exact=True, encoding=state.encoding)
