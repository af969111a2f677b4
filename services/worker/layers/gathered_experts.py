"""Experts spread over all ranks of a cell, for steps of one size: all tokens go to all ranks, and sums come back.

A step with two ranks, four experts and two experts per token; `a3` is what expert 3 adds to token a:

    rank 0: experts 0, 1            rank 1: experts 2, 3
    tokens a, b                     tokens c, d
          '---------- all_gather ---------'                  with the tokens' experts and weights
    a b c d                         a b c d
    a0  b1  c0 + c1  0              a2  b3  0  d2 + d3       a rank's own experts add something, the others nothing
          '-------- reduce_scatter -------'
    a0 + a2  b1 + b3                c0 + c1  d2 + d3

More is sent than by `expert_parallel`, but all sizes are known on the host, whatever the experts are: nothing is read
from the device, so a graph can hold it. Decode steps have few tokens.

Source: Megatron-LM, `MoEAllGatherTokenDispatcher` (megatron/core/transformer/moe/token_dispatcher.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops import ExpertsKernel, Ops
from services.worker.parallel.communicator import Communicator, sum_in_order


class GatheredExperts:
    """One layer's experts, of which each rank of `ep` holds a run. All ranks must call it with equally many tokens.

    A TP group's ranks have the same tokens. Each contributes its share of them, so that no token is computed twice; and
    if the experts are spread over one group only, its ranks have all tokens already.
    """

    def __init__(
        self, ops: Ops, parts: Sequence[ExpertsKernel], *, local: range, tp: Communicator, ep: Communicator
    ) -> None:
        """Share the experts of `parts` out over `ep`; `local` are the numbers of this rank's experts."""
        self._ops = ops
        self._parts = list(parts)
        self._local = local
        self._tp = tp
        self._ep = ep

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """The experts' weighted sum for each token: [T, hidden] to a new tensor of its shape."""
        num_tokens, num_chosen = expert_ids.shape
        share = -(-num_tokens // self._tp.size)
        num_added = share * self._tp.size - num_tokens
        if self._ops.is_exact:
            # A token's sum is by rising expert.
            expert_ids, order = expert_ids.sort(dim=1)
            expert_weights = expert_weights.gather(1, order)
        if num_added:
            # Shares of one size; what is added to them goes to no expert.
            x, expert_weights = F.pad(x, (0, 0, 0, num_added)), F.pad(expert_weights, (0, 0, 0, num_added))
            expert_ids = F.pad(expert_ids, (0, 0, 0, num_added), value=-1)
        own = slice(self._tp.rank * share, (self._tp.rank + 1) * share)
        # The bits of the weights go with the numbers, so that a layer has one collective less.
        choices = self._gather(torch.cat((expert_ids, expert_weights.view(torch.int32)), dim=1), own)
        rows, weights = self._gather(x, own), choices[:, num_chosen:].contiguous().view(torch.float32)
        add_up = self._add_up_exactly if self._ops.is_exact else self._add_up
        summed = add_up(rows, self._local_ids(choices[:, :num_chosen]), weights, expert_weights[own])
        return self._tp.gather_rows(summed)[:num_tokens]

    def _gather(self, x: Tensor, own: slice) -> Tensor:
        """All ranks' shares of their groups' tokens, in rank order."""
        return x if self._ep is self._tp else self._ep.gather_rows(x[own])

    def _local_ids(self, expert_ids: Tensor) -> Tensor:
        """The places of experts among this rank's; the number of those for one that is elsewhere, or that is none."""
        places = expert_ids - self._local.start
        # Not `where`, for whose number the host would wait.
        return places.masked_fill((places < 0) | (places >= len(self._local)), len(self._local))

    def _add_up(self, rows: Tensor, local_ids: Tensor, weights: Tensor, own_weights: Tensor) -> Tensor:  # noqa: ARG002
        """Each of this rank's tokens' weighted sum over all ranks' experts, [share, hidden].

        Args:
            rows: [ep size * share, hidden].
            local_ids: [ep size * share, k].
            weights: [ep size * share, k].
            own_weights: [share, k].
        """
        (kernel,) = self._parts
        return self._ep.reduce_scatter_rows(kernel(rows, local_ids, weights))

    def _add_up_exactly(self, rows: Tensor, local_ids: Tensor, weights: Tensor, own_weights: Tensor) -> Tensor:  # noqa: ARG002
        """As `_add_up`, with the bits that the experts' sums have on one rank.

        Each expert's output comes from one rank, and the others add zeros to it; then the sums are as in
        `ExpertParallel`.
        """
        (num_tokens, num_chosen), hidden = own_weights.shape, rows.shape[1]
        pairs = rows.unsqueeze(1).expand(-1, num_chosen, -1).reshape(-1, hidden)
        ids = local_ids.reshape(-1, 1)
        ones = torch.ones(ids.shape, device=rows.device)
        outputs = self._ep.reduce_scatter_rows(torch.stack([part(pairs, ids, ones) for part in self._parts], dim=1))
        tokens = torch.arange(num_tokens, device=rows.device).unsqueeze(1).expand(-1, num_chosen).flatten()
        own_weights = own_weights.flatten()
        parts = [
            self._ops.combine_experts(part, tokens, own_weights, num_tokens=num_tokens) for part in outputs.unbind(1)
        ]
        return parts[0] if len(parts) == 1 else sum_in_order(parts)
