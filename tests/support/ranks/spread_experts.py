"""A layer's experts, spread over ranks, and its steps' tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.forward.forward_context import DpMetadata, ForwardContext
from services.worker.forward.kv_cache import KvCache, KvCacheSpec, attention_cache
from services.worker.layers.moe import Experts, load_experts
from services.worker.layers.shard import Part, Shard
from services.worker.layout import RankLayout
from services.worker.ops import ExpertWeights, Ops, SwigluClamp
from services.worker.parallel.communicator import Parallel
from services.worker.weights.dummy_weights import DummyWeights
from tests.support.models.paged_model import attention_metadata

HIDDEN_SIZE, INNER_SIZE = 16, 10


@dataclass(frozen=True)
class Layer:
    """A layer's experts, and the tokens of each DP rank."""

    num_experts: int
    num_chosen: int
    num_tokens_across_dp: tuple[int, ...]
    clamp: SwigluClamp | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def random(self, *shape: int, part: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * self.seed + part))

    def read(self, expert: int, inner: Part) -> ExpertWeights:
        def rows(part: int, *shape: int) -> Tensor:
            whole = self.random(2, INNER_SIZE, *shape, part=10 * expert + part)
            return whole[:, inner.run].flatten(0, 1).to(self.dtype)

        down = self.random(HIDDEN_SIZE, INNER_SIZE, part=10 * expert + 2)[:, inner.run].contiguous().to(self.dtype)
        down_bias = self.random(HIDDEN_SIZE, part=10 * expert + 3).to(self.dtype) if not inner.start else None
        return ExpertWeights(rows(0, HIDDEN_SIZE), down, rows(1), down_bias)

    def load(self, ops: Ops, parallel: Parallel) -> Experts:
        # The test provides the experts' weights.
        shard = Shard(ops, DummyWeights(0, self.dtype, lambda _: None), parallel)
        return load_experts(
            shard, num_experts=self.num_experts, inner_size=INNER_SIZE, read=self.read, clamp=self.clamp
        )

    def step(self, dp_rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """A rank's tokens, the experts they go to, and their weights."""
        num_tokens, part = self.num_tokens_across_dp[dp_rank], 5000 + 10 * dp_rank
        scores = self.random(num_tokens, self.num_experts, part=part)
        weights = self.random(num_tokens, self.num_chosen, part=part + 1)
        return self.tokens(dp_rank), scores.topk(self.num_chosen).indices.int(), weights

    def tokens(self, dp_rank: int) -> Tensor:
        """A rank's tokens."""
        num_tokens = self.num_tokens_across_dp[dp_rank]
        return self.random(num_tokens, HIDDEN_SIZE, part=5002 + 10 * dp_rank).to(self.dtype)


def step_context(ops: Ops, num_tokens_across_dp: tuple[int, ...], *, graph_batch_size: int = 0) -> ForwardContext:
    """The context of a step in which the DP ranks compute this many tokens; the same on all of them."""
    cache = KvCache(KvCacheSpec((attention_cache(1, 2, torch.float32),)), num_blocks=1, block_size=4)
    metadata = attention_metadata([[0]], [1], [1], block_size=4, is_prefill=True)
    plan = ops.plan_attention(metadata, cache)
    return ForwardContext(plan, cache, DpMetadata(num_tokens_across_dp, graph_batch_size))


def ep_layouts(dp_size: int, tp_size: int) -> list[RankLayout]:
    """The ranks of a cell with expert parallelism, in the order of `ep_rank`."""
    return [
        RankLayout(dp_rank, dp_size, tp_rank, tp_size, has_expert_parallel=True)
        for dp_rank in range(dp_size)
        for tp_rank in range(tp_size)
    ]
