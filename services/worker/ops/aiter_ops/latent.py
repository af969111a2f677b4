"""Latent attention, dense and sparse, in torch.

AITER's assembly kernels for it have few numbers of heads; its Triton kernel is compiled anew for every batch size.

No op waits for the device. Lengths on the host are upper bounds; masks come from lengths on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionPlan
from services.worker.ops.cpu_mla import largest_columns

# Bounds the scores in float32 that are held at a time, and the cache rows that sparse attention gathers.
_MAX_SCORES = 1 << 26


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with equally many new tokens; their rows of the step are consecutive."""

    tokens: slice
    seqs: slice
    query_len: int
    max_context_len: int


class AiterLatent:
    """The latent part of the section "Attention" of `Ops`. It needs no AITER."""

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
        if selected is None:
            return _attend(query, latent_cache, plan, scale=scale, value_dim=value_dim)
        return _attend_to_selected(query, latent_cache, plan, selected, scale=scale, value_dim=value_dim)

    def select_context(
        self,
        index_query: Tensor,
        index_weights: Tensor,
        index_cache: Tensor,
        plan: AttentionPlan,
        *,
        num_selected: int,
    ) -> Tensor | None:
        return _select_context(index_query, index_weights, index_cache, plan, num_selected=num_selected)


def _attend(query: Tensor, latent_cache: Tensor, plan: AttentionPlan, *, scale: float, value_dim: int) -> Tensor:
    output = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
    num_heads = query.shape[1]
    for part, keys, last_seen in _parts(latent_cache, plan, num_heads):
        rows = query[part].reshape(len(keys), -1, query.shape[2])
        scores = torch.matmul(rows, keys.transpose(1, 2)).float().mul_(scale)
        scores = scores.view(*last_seen.shape, num_heads, -1)
        is_hidden = torch.arange(keys.shape[1], device=keys.device) > last_seen[..., None]
        weights = scores.masked_fill_(is_hidden[:, :, None], float("-inf")).softmax(dim=-1).to(query.dtype)
        attended = torch.matmul(weights.flatten(1, 2), keys[..., :value_dim])
        output[part] = attended.view(-1, num_heads, value_dim)
    return output


def _attend_to_selected(
    query: Tensor, latent_cache: Tensor, plan: AttentionPlan, selected: Tensor, *, scale: float, value_dim: int
) -> Tensor:
    output = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype, device=query.device)
    size = max(_MAX_SCORES // (selected.shape[1] * query.shape[2]), 1)
    seqs, _ = _places(plan)
    for start in range(0, len(query), size):
        part = slice(start, start + size)
        slots = _slots(plan, seqs[part], selected[part].clamp(min=0), latent_cache.shape[1])
        keys = latent_cache.flatten(0, 1)[slots]
        scores = torch.matmul(query[part], keys.transpose(1, 2)).float().mul_(scale)
        weights = scores.masked_fill_(selected[part, None] < 0, float("-inf")).softmax(dim=-1)
        output[part] = torch.matmul(weights.to(query.dtype), keys[..., :value_dim])
    return output


def _select_context(
    index_query: Tensor, index_weights: Tensor, index_cache: Tensor, plan: AttentionPlan, *, num_selected: int
) -> Tensor | None:
    if plan.metadata.max_context_len <= num_selected:
        return None
    selected = torch.full((len(index_query), num_selected), -1, dtype=torch.int64, device=index_query.device)
    num_heads = index_query.shape[1]
    for part, keys, last_seen in _parts(index_cache, plan, num_heads):
        rows = index_query[part].reshape(len(keys), -1, index_query.shape[2]).float()
        products = torch.matmul(rows, keys.float().transpose(1, 2)).relu_()
        weights = index_weights[part].reshape(-1, 1, num_heads)
        scores = torch.matmul(weights, products.view(len(weights), num_heads, -1)).squeeze(1)
        seen = last_seen.flatten()[:, None]
        scores.masked_fill_(torch.arange(keys.shape[1], device=keys.device) > seen, float("-inf"))
        best = largest_columns(scores, min(num_selected, scores.shape[1]))
        selected[part, : best.shape[1]] = best.masked_fill_(best > seen, -1)
    return selected


def _parts(cache: Tensor, plan: AttentionPlan, num_heads: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The step's tokens in parts whose scores are few enough.

    Yields:
        (rows of the step, their contexts [B, S, width] for B sequences, the last position that each row sees
        [B, rows / B] int64).
    """
    metadata = plan.metadata
    _, positions = _places(plan)
    for group in _groups(plan):
        length = group.max_context_len
        num_blocks = -(-length // cache.shape[1])
        tables = metadata.block_tables[group.seqs, :num_blocks]
        contexts = cache[tables.long()].flatten(1, 2)[:, :length]
        # What lies after a context may be NaN, and a weight of 0 does not remove it.
        is_outside = torch.arange(length, device=cache.device) >= metadata.context_lens[group.seqs, None]
        contexts.masked_fill_(is_outside[..., None], 0.0)
        # Only the tokens of a single sequence can be divided.
        size = group.query_len
        if len(contexts) == 1:
            size = max(_MAX_SCORES // (num_heads * length), 1)
        for start in range(0, group.query_len, size):
            stop = group.tokens.stop if size >= group.query_len else group.tokens.start + start + size
            part = slice(group.tokens.start + start, min(stop, group.tokens.stop))
            yield part, contexts, positions[part].view(len(contexts), -1)


def _groups(plan: AttentionPlan) -> Iterator[_Group]:
    """Decodes together, or each sequence alone."""
    metadata = plan.metadata
    lens, contexts = metadata.query_lens, metadata.context_lens_host
    if not metadata.is_prefill and len(set(lens)) == 1:
        yield _Group(slice(0, sum(lens)), slice(0, len(lens)), lens[0], max(contexts))
        return
    start = 0
    for seq, (query_len, context_len) in enumerate(zip(lens, contexts, strict=True)):
        yield _Group(slice(start, start + query_len), slice(seq, seq + 1), query_len, context_len)
        start += query_len


def _places(plan: AttentionPlan) -> tuple[Tensor, Tensor]:
    """The sequence of each of the step's tokens and its position there, both [T] int64."""
    metadata = plan.metadata
    rows = torch.arange(len(metadata.slot_mapping), device=metadata.slot_mapping.device)
    ends = metadata.cu_seqlens_q[1:].long()
    seqs = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
    return seqs, metadata.context_lens[seqs] - ends[seqs] + rows


def _slots(plan: AttentionPlan, seqs: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """The slots of `positions` [n, m] in the sequences `seqs` [n]."""
    blocks = plan.metadata.block_tables[seqs[:, None], positions // block_size]
    return blocks.long() * block_size + positions % block_size
