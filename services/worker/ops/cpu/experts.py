"""Experts of the `cpu` backend: tokens sorted by expert, one product per active expert and projection."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from services.worker.ops.experts import Expert, ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.protocol import Ops


def prepare_experts(
    ops: Ops, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
) -> ExpertsKernel:
    """Prepare two linear layers for each expert."""
    prepare_linear = partial(ops.prepare_linear, dtype=dtype)
    return CpuExperts([Expert(weights, clamp, prepare_linear) for weights in experts])


class CpuExperts:
    """Experts computed one after the other, each for all of its tokens."""

    def __init__(self, experts: list[Expert]) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        flat_ids = expert_ids.flatten()
        order = flat_ids.argsort(stable=True)
        # The last count is of experts that are elsewhere.
        counts = torch.bincount(flat_ids, minlength=len(self._experts) + 1).tolist()
        tokens = torch.split(order // expert_ids.shape[1], counts)
        weights = torch.split(expert_weights.flatten()[order], counts)
        total = torch.zeros(x.shape, dtype=torch.float32)
        # Added up expert by expert: the outputs of all experts at once would take k rows per token.
        for expert, rows, row_weights in zip(self._experts, tokens[:-1], weights[:-1], strict=True):
            if len(rows):
                _add_weighted(total, expert(x.index_select(0, rows)), rows, row_weights)
        return total.to(x.dtype)


def combine_experts(outputs: Tensor, tokens: Tensor, weights: Tensor, *, num_tokens: int) -> Tensor:
    """Add all outputs at once."""
    total = torch.zeros(num_tokens, outputs.shape[1])
    _add_weighted(total, outputs, tokens, weights)
    return total.to(outputs.dtype)


def _add_weighted(total: Tensor, outputs: Tensor, tokens: Tensor, weights: Tensor) -> None:
    total.index_add_(0, tokens, outputs * weights.unsqueeze(1))
