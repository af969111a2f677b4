"""Token embeddings."""

from __future__ import annotations

from torch import Tensor

from services.worker.ops import Ops


class Embedding:
    """One vector per token id."""

    def __init__(self, ops: Ops, weight: Tensor) -> None:
        """Keep `weight` [vocabulary, hidden], which may be the largest tensor of all."""
        self._ops = ops
        self._weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] int64 to a new [T, hidden]."""
        return self._ops.embedding(token_ids, self._weight)
