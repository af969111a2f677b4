"""Mixtures of experts (arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.layers.expert_parallel import ExpertParallel, local_experts
from services.worker.layers.linear import Linear
from services.worker.layers.shard import Part, Shard
from services.worker.ops import ExpertsKernel, ExpertWeights, Ops, RoutingRule, SwigluClamp
from services.worker.parallel.communicator import Communicator

# Maps (x [T, hidden], expert ids [T, k] int32, weights [T, k] float32) to the weighted sums of each token's experts, a
# new [T, hidden]. Arguments and result are the same on all ranks of a TP group.
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
# Reads a part of an expert's inner size. Only the part that starts at 0 has the bias of the down projection, as
# outputs of all parts are added up.
ReadExpert = Callable[[int, Part], ExpertWeights]


class Router:
    """Chooses each token's experts."""

    def __init__(self, ops: Ops, logits: Linear, rule: RoutingRule, *, dtype: torch.dtype) -> None:
        """`logits` computes in `dtype`."""
        self._ops = ops
        self._logits = logits
        self._rule = rule
        self._dtype = dtype

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, hidden] to expert ids [T, k] int32 and weights [T, k] float32; see `Ops.route`."""
        return self._ops.route(self._logits(x.to(self._dtype)).float(), self._rule)


class SplitExperts:
    """One layer's experts, each split over the TP ranks."""

    def __init__(self, kernel: ExpertsKernel, tp: Communicator) -> None:
        self._kernel = kernel
        self._tp = tp

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """The experts' weighted sum for each token, over all TP ranks."""
        return self._tp.all_reduce(self._kernel(x, expert_ids, expert_weights))


class SparseMlp:
    """The weighted sum of each token's experts, plus any shared expert."""

    def __init__(self, router: Router, experts: Experts, shared: Callable[[Tensor], Tensor] | None = None) -> None:
        """`shared` maps [T, hidden] to a new [T, hidden], the same on all ranks of a TP group."""
        self._router = router
        self._experts = experts
        self._shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] to a new [T, hidden]."""
        output = self._experts(x, *self._router(x))
        return output if self._shared is None else output.add_(self._shared(x))


def load_experts(
    shard: Shard, *, num_experts: int, inner_size: int, read: ReadExpert, clamp: SwigluClamp | None = None
) -> Experts:
    """Load this rank's share of a layer's experts: a part of each, or with expert parallelism a run of whole ones.

    Raises:
        ModelDirectoryError: the inner size cannot be split over the TP ranks.
    """
    ops, tp, ep = shard.ops, shard.parallel.tp, shard.parallel.ep

    def prepare(numbers: range, part: Part) -> ExpertsKernel:
        return ops.prepare_experts((read(number, part) for number in numbers), clamp, shard.weights.dtype)

    parts = shard.parts("moe_intermediate_size", inner_size)
    if ep is None:
        return SplitExperts(prepare(range(num_experts), parts[tp.rank]), tp)
    if not ops.is_exact:
        # An exact backend must give the same bits as without expert parallelism, so it keeps the sum over the parts.
        parts = [Part.whole(inner_size)]
    kernels = [prepare(local_experts(num_experts, ep.rank, ep.size), part) for part in parts]
    return ExpertParallel(ops, kernels, num_experts=num_experts, tp=tp, ep=ep)
