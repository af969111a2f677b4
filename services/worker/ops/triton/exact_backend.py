"""The `triton-exact` backend: a row's bits do not depend on its batch, nor on how its context was computed.

It has the kernels of `triton`, launched so that a row is always computed in the same way:

    products        our own for plain weights too, with tiles of one size, so one matrix instruction and one order, and
                    no splits; rows that are quantised to FP8 have scales of their own
    attention       decodes and chunks take one kernel; tiles of the context are counted from its first token, and no
                    context is split
    experts         tiles of one size, sums by rising expert

Norms, rotations, routing and writes to the cache have a program for each row anyway. That a row's place in a tile of a
matrix instruction does not change its bits is a property of the hardware.

Source: He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops.arguments import AttentionParams
from services.worker.ops.experts import ExpertsKernel, ExpertWeights, SwigluClamp
from services.worker.ops.matrices import Matrix
from services.worker.ops.protocol import LinearKernel, PerHeadKernel
from services.worker.ops.triton.attention.context_selection import select_context
from services.worker.ops.triton.attention.latent import latent_attention
from services.worker.ops.triton.attention.prefill import prefill_attention
from services.worker.ops.triton.attention.tile import PagedSequences
from services.worker.ops.triton.backend import TritonOps, check_triton, select_sequences
from services.worker.ops.triton.products.experts import TritonExperts
from services.worker.ops.triton.products.linear import PackedLinear
from services.worker.ops.triton.products.per_head import ExactPerHeadLinear


class ExactPlan(AttentionPlan):
    """All sequences of a step, whatever their lengths."""

    __slots__ = ("sequences",)

    def __init__(self, metadata: AttentionMetadata) -> None:
        super().__init__(metadata)
        sequences = select_sequences(metadata, slice(0, len(metadata.query_lens)))
        self.sequences: list[PagedSequences] = [] if sequences is None else [sequences]


class TritonExactOps(TritonOps):
    """See `Ops` for what each method computes."""

    name = "triton-exact"
    is_exact = True

    # -- Weights ------------------------------------------------------------------------------------------

    def prepare_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> LinearKernel:
        return PackedLinear(weight, bias, dtype, is_exact=True, encoding=self._encoding)

    def prepare_per_head_linear(self, weight: Tensor) -> PerHeadKernel:
        return ExactPerHeadLinear(weight)

    # -- Attention ----------------------------------------------------------------------------------------

    def plan_attention(self, metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:  # noqa: ARG002
        return ExactPlan(metadata)

    def decode_attention(
        self, query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams
    ) -> Tensor:
        assert isinstance(plan, ExactPlan)
        width = query.shape[1] * cache[1].shape[3]
        output = torch.empty((len(query), width), dtype=query.dtype, device=query.device)
        for sequences in plan.sequences:
            prefill_attention(query, cache, output, sequences, params, is_exact=True)
        return output

    def mla_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        value_dim: int,
        selected: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(plan, ExactPlan)
        output = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
        for sequences in plan.sequences:
            latent_attention(query, latent_cache, output, sequences, scale=scale, selected=selected, is_exact=True)
        return output

    def select_context(
        self,
        index_query: Tensor,
        index_weights: Tensor,
        index_cache: Tensor,
        plan: AttentionPlan,
        *,
        num_selected: int,
    ) -> Tensor | None:
        """See `Ops.select_context`; never None, since a longer context in the same step would change that."""
        assert isinstance(plan, ExactPlan)
        selected = select_context(index_query, index_weights, index_cache, plan.sequences, num_selected=num_selected)
        # In one order, in which unused entries are last.
        return selected.sort(dim=-1, descending=True).values

    # -- Experts ------------------------------------------------------------------------------------------

    def prepare_experts(
        self, experts: Iterable[ExpertWeights], clamp: SwigluClamp | None, dtype: torch.dtype
    ) -> ExpertsKernel:
        return TritonExperts(experts, clamp, dtype, is_exact=True, encoding=self._encoding)


def load_exact_ops() -> TritonExactOps:
    """Create the backend.

    Raises:
        DeviceError: as from `check_triton`.
    """
    check_triton(TritonExactOps.name)
    return TritonExactOps()
