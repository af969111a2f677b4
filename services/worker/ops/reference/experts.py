"""Experts of the `reference` backend: one token and one expert at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.ops.experts import Expert


class ReferenceExperts:
    """See `Ops.prepare_experts`."""

    def __init__(self, experts: list[Expert]) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        # Sorted, so that a token's sum has the same order whatever order the router returns its experts in.
        numbers, order = expert_ids.flatten().sort(stable=True)
        # Experts that are elsewhere come last.
        order = order[: int((numbers < len(self._experts)).sum())]
        tokens = order // expert_ids.shape[1]
        rows = zip(numbers.tolist(), x[tokens], strict=False)
        outputs = [self._experts[number](row.unsqueeze(0)) for number, row in rows]
        return combine_experts(
            torch.cat(outputs) if outputs else x[:0], tokens, expert_weights.flatten()[order], num_tokens=len(x)
        )


def combine_experts(outputs: Tensor, tokens: Tensor, weights: Tensor, *, num_tokens: int) -> Tensor:
    """See `Ops.combine_experts`."""
    # Each sum and each row has its own memory, because an offset in a larger tensor may affect the choice of kernel.
    totals = [torch.zeros(outputs.shape[1]) for _ in range(num_tokens)]
    for output, token, weight in zip(outputs, tokens.tolist(), weights.tolist(), strict=True):
        totals[token].add_(output.clone(), alpha=weight)
    return torch.stack(totals).to(outputs.dtype) if totals else outputs.new_empty(0, outputs.shape[1])
