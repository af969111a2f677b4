"""The mixture of experts: a feed-forward network of which each token uses a part (arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.layers.linear import Linear
from services.worker.ops import ExpertsKernel, Ops, RoutingRule


class Router:
    """Chooses each token's experts by the product of the token with a vector per expert."""

    def __init__(self, ops: Ops, logits: Linear, rule: RoutingRule, *, dtype: torch.dtype) -> None:
        """Keep what is given; `dtype` is what `logits` computes in."""
        self._ops = ops
        self._logits = logits
        self._rule = rule
        self._dtype = dtype

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of x [T, hidden]: expert ids [T, k] int64 and their weights [T, k] float32; see `Ops.route`."""
        return self._ops.route(self._logits(x.to(self._dtype)).float(), self._rule)


class SparseMlp:
    """The weighted sum of each token's experts, beside an expert that all tokens use if there is one."""

    def __init__(
        self, router: Router, experts: ExpertsKernel, shared: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Wire one layer; `shared` maps [T, hidden] to a new [T, hidden]."""
        self._router = router
        self._experts = experts
        self._shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to a new [T, hidden]."""
        output = self._experts(x, *self._router(x))
        return output if self._shared is None else output.add_(self._shared(x))
