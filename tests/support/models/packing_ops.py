"""A backend that says it computes every packed format, keeps weights packed, and counts what it is given."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from typing_extensions import override

from services.worker.ops.matrices import Matrix, dense
from services.worker.ops.matrix_rows import MatrixFormat, format_of
from services.worker.ops.protocol import EmbeddingKernel, LinearKernel
from services.worker.ops.reference.backend import ReferenceOps


class PackingOps(ReferenceOps):
    """Computes as `reference` does, with dense copies that it makes for every call."""

    formats = frozenset(MatrixFormat)
    automatic_quantization: MatrixFormat | None = MatrixFormat.INT8

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[MatrixFormat | None] = Counter()
        """How many products have weights in each format; None means tensors."""
        self.tied: Matrix | None = None

    @override
    def prepare_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
        self.counts[format_of(weight)] += 1
        prepare = super().prepare_linear
        if isinstance(weight, Tensor):
            return prepare(weight, bias, dtype)

        def compute(x: Tensor) -> Tensor:
            return prepare(weight, bias, dtype)(x)

        return compute

    @override
    def prepare_tied(self, weight: Matrix, dtype: torch.dtype) -> tuple[EmbeddingKernel, LinearKernel]:
        self.tied = weight
        return (lambda token_ids: dense(weight, dtype)[token_ids]), self.prepare_linear(weight, None, dtype)
