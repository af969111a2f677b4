"""Experts of the `reference` backend: each token alone, and of its experts one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.ops.experts import Expert


class ReferenceExperts:
    """See `Ops.prepare_experts`. The experts compute row by row."""

    def __init__(self, experts: list[Expert]) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        rows = zip(x, expert_ids.tolist(), expert_weights.tolist(), strict=True)
        return torch.stack([self._run(row, row_ids, weights) for row, row_ids, weights in rows])

    def _run(self, row: Tensor, expert_ids: list[int], weights: list[float]) -> Tensor:
        total = torch.zeros(row.shape, dtype=torch.float32)
        # Sorted, so that the sum has one order, whatever order the router gives them in.
        for expert_id, weight in sorted(zip(expert_ids, weights, strict=True)):
            total.add_(self._experts[expert_id](row.unsqueeze(0)).squeeze(0), alpha=weight)
        return total.to(row.dtype)
