"""A backend that says it computes every packed format, and keeps what it is given."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat, format_of
from services.worker.ops.protocol import EmbeddingKernel, LinearKernel
from services.worker.ops.reference_ops import ReferenceOps


class PackingOps(ReferenceOps):
    """Computes as `reference` does, with dense copies."""

    formats = frozenset(MatrixFormat)

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Matrix] = []
        self.tied: Matrix | None = None

    @property
    def counts(self) -> Counter[MatrixFormat | None]:
        """How many products have weights in each format; None stands for tensors."""
        return Counter(format_of(weight) for weight in self.weights)

    def prepare_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
        """See `Ops`."""
        self.weights.append(weight)
        return super().prepare_linear(weight, bias, dtype)

    def prepare_tied(self, weight: Matrix, dtype: torch.dtype) -> tuple[EmbeddingKernel, LinearKernel]:
        """See `Ops`."""
        self.tied = weight
        return super().prepare_embedding(weight, dtype), super().prepare_linear(weight, None, dtype)
