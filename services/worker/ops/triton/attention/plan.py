"""Attention of the `triton` backend: a step's sequences, each by the kernel for its number of new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops.arguments import AttentionParams, HeadNorms, RopeRows
from services.worker.ops.triton import kv_write
from services.worker.ops.triton import norm_rope_write as heads
from services.worker.ops.triton.attention.context_selection import select_context as select_positions
from services.worker.ops.triton.attention.decode import decode_attention as attend_decodes
from services.worker.ops.triton.attention.latent import latent_attention
from services.worker.ops.triton.attention.prefill import prefill_attention as attend_chunks
from services.worker.ops.triton.attention.tile import PagedSequences
from shared.request.limits import MAX_DRAFT_TOKENS


class TritonPlan(AttentionPlan):
    """A step's sequences by kernel: first those with few new tokens, then the longer chunks.

    A decode with drafts and a short chunk are the same to attention. In a mixed step decodes come first.
    """

    __slots__ = ("chunks", "decodes")

    def __init__(self, metadata: AttentionMetadata) -> None:
        super().__init__(metadata)
        num_decodes = _num_leading_decodes(metadata)
        self.decodes = select_sequences(metadata, slice(0, num_decodes))
        self.chunks = select_sequences(metadata, slice(num_decodes, len(metadata.query_lens)))

    def parts(self) -> list[PagedSequences]:
        """The decodes and the chunks, without what the step does not have."""
        return [part for part in (self.decodes, self.chunks) if part is not None]


def plan_attention(metadata: AttentionMetadata, kv_cache: KvCache) -> AttentionPlan:
    """Sort the sequences by kernel."""
    return TritonPlan(metadata)


def write_kv(key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
    """Write both in one launch."""
    kv_write.write_kv(key, value, cache, plan.metadata.slot_mapping)


def norm_rope_write(
    qkv: Tensor,
    norms: HeadNorms | None,
    rows: RopeRows,
    *,
    num_heads: int,
    cache: tuple[Tensor, ...],
    plan: AttentionPlan,
) -> None:
    """Compute all in one launch."""
    # The key goes only to the cache, where `prefill_attention` reads it.
    slot_mapping = plan.metadata.slot_mapping
    heads.norm_rope_write(qkv.flatten(1), norms, rows, num_heads=num_heads, cache=cache, slot_mapping=slot_mapping)


def write_cache(values: Tensor, cache: Tensor, plan: AttentionPlan) -> None:
    """Write in one launch."""
    kv_write.write_cache(values, cache, plan.metadata.slot_mapping)


def decode_attention(query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams) -> Tensor:
    """Attend with a kernel for each kind of sequence."""
    assert isinstance(plan, TritonPlan)
    width = query.shape[1] * cache[1].shape[-1]
    output = torch.empty((query.shape[0], width), dtype=query.dtype, device=query.device)
    if plan.decodes is not None:
        attend_decodes(query, cache, output, plan.decodes, params)
    if plan.chunks is not None:
        attend_chunks(query, cache, output, plan.chunks, params)
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
    """Attend with one kernel, launched for each kind of sequence."""
    assert isinstance(plan, TritonPlan)
    output = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
    for sequences in plan.parts():
        latent_attention(query, latent_cache, output, sequences, scale=scale, selected=selected)
    return output


def select_context(
    index_query: Tensor,
    index_weights: Tensor,
    index_cache: Tensor,
    plan: AttentionPlan,
    *,
    num_selected: int,
) -> Tensor | None:
    """Select for the whole step; None if no context is long enough."""
    assert isinstance(plan, TritonPlan)
    if plan.metadata.max_context_len <= num_selected:
        return None
    return select_positions(index_query, index_weights, index_cache, plan.parts(), num_selected=num_selected)


def select_sequences(metadata: AttentionMetadata, seqs: slice) -> PagedSequences | None:
    """The sequences `seqs` of a step; None if there are none."""
    query_lens = metadata.query_lens[seqs]
    if not query_lens:
        return None
    return PagedSequences(
        block_tables=metadata.block_tables[seqs],
        context_lens=metadata.context_lens[seqs],
        cu_seqlens_q=metadata.cu_seqlens_q[seqs.start : seqs.stop + 1],
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_context_len=max(metadata.context_lens_host[seqs]),
    )


def _num_leading_decodes(metadata: AttentionMetadata) -> int:
    """How many sequences before the first long chunk have few enough new tokens for the decode kernel."""
    if not metadata.is_prefill:
        return len(metadata.query_lens)
    long_chunks = (seq for seq, length in enumerate(metadata.query_lens) if length > MAX_DRAFT_TOKENS + 1)
    return next(long_chunks, len(metadata.query_lens))
