"""Experts of the `reference` backend: one token and one expert at a time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from services.worker.ops.experts import Expert, ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.protocol import Ops
from services.worker.ops.routing import RoutingRule
from services.worker.ops.routing import route as route_rows


def route(logits: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Route each token alone."""
    rows = [route_rows(row.clone().unsqueeze(0), rule) for row in logits]
    return torch.cat([expert_ids for expert_ids, _ in rows]), torch.cat([weights for _, weights in rows])


def prepare_experts(
    ops: Ops, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
) -> ExpertsKernel:
    """Prepare two linear layers for each expert."""
    prepare_linear = partial(ops.prepare_linear, dtype=dtype)
    return ReferenceExperts([Expert(weights, clamp, prepare_linear) for weights in experts])


class ReferenceExperts:
    """Experts computed for each token alone."""

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
    """Add one output at a time."""
    # Each sum and each row has its own memory, because an offset in a larger tensor may affect the choice of kernel.
    totals = [torch.zeros(outputs.shape[1]) for _ in range(num_tokens)]
    for output, token, weight in zip(outputs, tokens.tolist(), weights.tolist(), strict=True):
        totals[token].add_(output.clone(), alpha=weight)
    return torch.stack(totals).to(outputs.dtype) if totals else outputs.new_empty(0, outputs.shape[1])
