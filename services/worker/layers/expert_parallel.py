"""Experts spread over all ranks of a cell: tokens' rows go to the ranks of their experts, and outputs come back.

One round with two ranks, four experts and two experts per token; `a3` is token a's row for expert 3:

    rank 0: experts 0, 1            rank 1: experts 2, 3
    tokens a, b                     tokens c, d
    a0 b1 | a2 b3                   c0 c1 | d2 d3            sorted by expert, and so by rank
          '---------- all_to_all ---------'                  dispatch
    a0 b1 | c0 c1                   a2 b3 | d2 d3            by sender, then by expert; the experts run
          '---------- all_to_all ---------'                  combine
    a0 b1 | a2 b3                   c0 c1 | d2 d3            weighted and summed per token

The host waits for the numbers of rows, so a step that runs from a graph uses `gathered_experts` instead.

Source: GShard, arXiv:2006.16668, section 3.2, but without a capacity: no token is ever dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from services.worker.forward.forward_context import get_forward_context
from services.worker.layers.gathered_experts import GatheredExperts
from services.worker.ops import ExpertsKernel, Ops
from services.worker.parallel.communicator import Communicator, sum_in_order

# Tokens per rank in a round; bounds its memory, as each token has a row for each of its experts.
_TOKENS_PER_ROUND = 512


def local_experts(num_experts: int, ep_rank: int, ep_size: int) -> range:
    """The experts that a rank holds."""
    return nth_run(num_experts, ep_rank, ep_size)


def nth_run(total: int, number: int, num_runs: int) -> range:
    """Run `number` of the `num_runs` runs of [0, total); a remainder makes the first ones longer by 1."""
    length, rest = divmod(total, num_runs)
    start = number * length + min(number, rest)
    return range(start, start + length + (number < rest))


class ExpertParallel:
    """One layer's experts, of which each rank of `ep` holds a run. All ranks must call it at the same point of a step.

    A TP group's ranks have the same tokens; each dispatches a run of them, and all receive all results. Every rank runs
    as many rounds as the one with the most tokens needs.
    """

    def __init__(
        self,
        ops: Ops,
        parts: Sequence[ExpertsKernel],
        *,
        num_experts: int,
        tp: Communicator,
        ep: Communicator,
        tokens_per_round: int = _TOKENS_PER_ROUND,
    ) -> None:
        """Keep this rank's experts.

        Args:
            parts: The experts of `local_experts`, numbered from 0. Each part computes a slice of every expert's inner
                size; an expert's output is the sum over the parts.
            num_experts: On all ranks.
            tp: The ranks with the same tokens.
            ep: All ranks of the cell.
        """
        self._ops = ops
        self._parts = list(parts)
        self._tp = tp
        self._ep = ep
        self._tokens_per_round = tokens_per_round
        self._num_experts = num_experts
        self._experts_per_rank = [len(local_experts(num_experts, rank, ep.size)) for rank in range(ep.size)]
        # The order of received rows: by sender, then by expert.
        self._received_ids = torch.arange(self._experts_per_rank[ep.rank], dtype=torch.int32).repeat(ep.size)
        self._gathered = GatheredExperts(ops, parts, local=local_experts(num_experts, ep.rank, ep.size), tp=tp, ep=ep)

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """The experts' weighted sum for each token, over all EP ranks."""
        graph_batch_size = get_forward_context().dp.graph_batch_size
        if graph_batch_size:
            assert len(x) == graph_batch_size, "the tokens are not those of the step's graph"
            return self._gathered(x, expert_ids, expert_weights)
        runs = [nth_run(len(x), rank, self._tp.size) for rank in range(self._tp.size)]
        outputs = [
            self._compute(x[rows], expert_ids[rows], expert_weights[rows])
            for rows in self._rounds(runs[self._tp.rank], num_tokens=len(x))
        ]
        # `all_gather` joins columns, so each rank's rows are flattened into one row first.
        own = torch.cat(outputs).view(1, -1)
        return self._tp.all_gather(own, tuple(len(run) * x.shape[1] for run in runs)).view(x.shape)

    def _rounds(self, run: range, *, num_tokens: int) -> Iterator[slice]:
        """Some rounds may have no tokens."""
        most = max(get_forward_context().dp.num_tokens_across_dp, default=num_tokens)
        assert num_tokens <= most, "more tokens than the step's num_tokens_across_dp"
        longest_run = len(nth_run(most, 0, self._tp.size))
        for start in range(run.start, run.start + longest_run, self._tokens_per_round):
            yield slice(min(start, run.stop), min(start + self._tokens_per_round, run.stop))

    def _compute(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        # Sorted by expert, and so by rank: neither a row's origin nor its expert needs to be sent.
        order = expert_ids.flatten().argsort(stable=True)
        tokens, weights = order // expert_ids.shape[1], expert_weights.flatten()[order]
        counts = torch.bincount(expert_ids.flatten(), minlength=self._num_experts)
        # The host needs the numbers of rows to send and receive, so it waits for the device here, twice a round.
        send_counts = [int(part.sum()) for part in torch.split(counts, self._experts_per_rank)]
        received = self._exchange_counts(counts)
        receive_counts: list[int] = received.sum(dim=1).tolist()
        rows = self._ep.all_to_all(x[tokens], send_counts, receive_counts)
        outputs = self._ep.all_to_all(self._run_experts(rows, received), receive_counts, send_counts)
        # The same order as with one part per TP rank: weighted sums first, then the sum over the parts.
        parts = [self._ops.combine_experts(part, tokens, weights, num_tokens=len(x)) for part in outputs.unbind(1)]
        return parts[0] if len(parts) == 1 else sum_in_order(parts)

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """The rows each rank sends to each of this rank's experts, [ep size, local experts]."""
        num_local = self._experts_per_rank[self._ep.rank]
        received = self._ep.all_to_all(counts, self._experts_per_rank, [num_local] * self._ep.size)
        return received.view(self._ep.size, num_local)

    def _run_experts(self, rows: Tensor, received: Tensor) -> Tensor:
        """Unweighted outputs for `rows` [N, hidden]: [N, parts, hidden]."""
        if not len(rows):
            return rows.new_empty(0, len(self._parts), rows.shape[1])
        received_ids = self._received_ids.to(received.device)
        expert_ids = received_ids.repeat_interleave(received.flatten()).unsqueeze(1)
        ones = torch.ones(expert_ids.shape, device=rows.device)
        return torch.stack([part(rows, expert_ids, ones) for part in self._parts], dim=1)
