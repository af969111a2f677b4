"""Attention of the `triton-exact` backend: decodes and chunks take one kernel, and no context is split."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops.arguments import AttentionParams
from services.worker.ops.triton.attention.context_selection import select_context as select_positions
from services.worker.ops.triton.attention.latent import latent_attention
from services.worker.ops.triton.attention.plan import select_sequences
from services.worker.ops.triton.attention.prefill import prefill_attention as attend_chunks
from services.worker.ops.triton.attention.tile import PagedSequences


class ExactPlan(AttentionPlan):
    """All sequences of a step, whatever their lengths."""

    __slots__ = ("sequences",)

    def __init__(self, metadata: AttentionMetadata) -> None:
        super().__init__(metadata)
        sequences = select_sequences(metadata, slice(0, len(metadata.query_lens)))
        self.sequences: list[PagedSequences] = [] if sequences is None else [sequences]


def plan_attention(metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:
    """Keep the sequences together."""
    return ExactPlan(metadata)


def decode_attention(query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams) -> Tensor:
    """Attend in one launch."""
    assert isinstance(plan, ExactPlan)
    width = query.shape[1] * cache[1].shape[3]
    output = torch.empty((len(query), width), dtype=query.dtype, device=query.device)
    for sequences in plan.sequences:
        attend_chunks(query, cache, output, sequences, params, is_exact=True)
    return output


def mla_attention(
    query: Tensor,
    latent_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    value_dim: int,
    selected: Tensor | None = None,
) -> Tensor:
    """Attend in one launch."""
    assert isinstance(plan, ExactPlan)
    output = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
    for sequences in plan.sequences:
        latent_attention(query, latent_cache, output, sequences, scale=scale, selected=selected, is_exact=True)
    return output


def select_context(
    index_query: Tensor,
    index_weights: Tensor,
    index_cache: Tensor,
    plan: AttentionPlan,
    *,
    num_selected: int,
) -> Tensor | None:
    """Select for the whole step; never None, since a longer context in the same step would change that."""
    assert isinstance(plan, ExactPlan)
    selected = select_positions(index_query, index_weights, index_cache, plan.sequences, num_selected=num_selected)
    # In one order, in which unused entries are last.
    return selected.sort(dim=-1, descending=True).values
