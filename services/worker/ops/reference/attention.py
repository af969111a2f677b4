"""Attention of the `reference` backend: one query at a time, over a copy of exactly the tokens it sees.

So its result does not depend on chunking, a cached prefix, the block size or drafts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache, split_scales
from services.worker.ops.arguments import AttentionParams

_MAX_E4M3 = torch.finfo(torch.float8_e4m3fn).max


@dataclass(slots=True, eq=False)
class ReferencePlan(AttentionPlan):
    """A step with the slots of each sequence's context, in order."""

    context_slots: list[Tensor]

    def sequences(self) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
        """Each sequence's slots, and its new tokens as (row, number of tokens up to and including it)."""
        first = 0
        for num_queries, slots in zip(self.metadata.query_lens, self.context_slots, strict=True):
            # A padded token has no context and is left out.
            seen = range(len(slots) - num_queries + 1, len(slots) + 1)
            yield slots, [(first + place, count) for place, count in enumerate(seen) if count > 0]
            first += num_queries


def plan_attention(metadata: AttentionMetadata, kv_cache: KvCache) -> ReferencePlan:
    """List the slots of each context."""
    offsets = torch.arange(kv_cache.block_size)
    context_slots = [
        (table[:, None] * kv_cache.block_size + offsets).flatten()[:context_len]
        for table, context_len in zip(metadata.block_tables.long(), metadata.context_lens_host, strict=True)
    ]
    return ReferencePlan(metadata, context_slots)


def write_kv(key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
    """Write what is written, one tensor after the other."""
    key_cache, value_cache, key_scale, value_scale = split_scales(cache)
    write_cache(_to_cached(key, key_scale), key_cache, plan)
    write_cache(_to_cached(value, value_scale), value_cache, plan)


def write_cache(values: Tensor, cache: Tensor, plan: AttentionPlan) -> None:
    """Write the rows that have a slot."""
    slots = plan.metadata.slot_mapping
    written = slots >= 0
    cache.flatten(0, 1)[slots[written]] = values[written]


def decode_attention(query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams) -> Tensor:
    """Attend with one query at a time."""
    assert isinstance(plan, ReferencePlan)
    key_cache, value_cache, key_scale, value_scale = split_scales(cache)
    output = query.new_zeros(query.shape[0], query.shape[1] * value_cache.shape[-1])
    for slots, rows in plan.sequences():
        keys = _from_cached(key_cache.flatten(0, 1)[slots], key_scale, query.dtype)
        values = _from_cached(value_cache.flatten(0, 1)[slots], value_scale, query.dtype)
        for row, end in rows:
            # The slice's offset in the fresh copy depends only on the position, and so do the result's bits.
            start = 0 if params.window is None else max(end - params.window, 0)
            output[row] = _attend(query[row], keys[start:end], values[start:end], params)
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
    """Attend with one query at a time."""
    assert isinstance(plan, ReferencePlan)
    output = query.new_zeros(*query.shape[:2], value_dim)
    params = AttentionParams(scale)
    for slots, rows in plan.sequences():
        latents = latent_cache.flatten(0, 1)[slots].unsqueeze(1)
        for row, end in rows:
            keys = latents[:end] if selected is None else latents[_used(selected[row])]
            output[row] = _attend(query[row], keys, keys[..., :value_dim], params).view(-1, value_dim)
    return output


def select_context(
    index_query: Tensor,
    index_weights: Tensor,
    index_cache: Tensor,
    plan: AttentionPlan,
    *,
    num_selected: int,
) -> Tensor | None:
    """Score one query at a time."""
    assert isinstance(plan, ReferencePlan)
    if plan.metadata.max_context_len <= num_selected:
        return None
    selected = torch.full((len(index_query), num_selected), -1)
    for slots, rows in plan.sequences():
        keys = index_cache.flatten(0, 1)[slots].float()
        for row, end in rows:
            products = torch.mm(index_query[row].float().clone(), keys[:end].T.contiguous())
            scores = torch.mv(torch.relu(products).T.contiguous(), index_weights[row].clone())
            best = torch.sort(scores, descending=True, stable=True).indices[:num_selected]
            selected[row, : len(best)] = best
    return selected


def _to_cached(values: Tensor, scale: Tensor | None) -> Tensor:
    """What a cache stores; with a `scale`, numbers of E4M3, of which none is larger than 448.

    A value that is not finite becomes NaN.
    """
    if scale is None:
        return values
    # A product with the inverse: GPUs do not round quotients alike.
    saturated = (values.float() * scale.reciprocal()).clamp(-_MAX_E4M3, _MAX_E4M3)
    return saturated.masked_fill(~values.isfinite(), math.nan).to(torch.float8_e4m3fn)


def _from_cached(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers that a cache stands for."""
    return stored if scale is None else (stored.float() * scale).to(dtype)


def _used(selected: Tensor) -> Tensor:
    """Sorted, so that selecting all positions equals dense attention bit by bit."""
    return selected[selected >= 0].sort().values


def _attend(query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """Attention [H * V] of one query [H, D] over the keys [length, K, D] and values [length, K, V] it sees."""
    num_kv_heads, head_dim = keys.shape[1:]
    grouped = query.reshape(num_kv_heads, -1, head_dim) * params.scale
    scores = torch.bmm(grouped, keys.permute(1, 2, 0).contiguous())
    if params.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sinks = params.sinks.view(num_kv_heads, -1, 1).to(scores.dtype)
        weights = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1].contiguous()
    return torch.bmm(weights, values.transpose(0, 1).contiguous()).flatten()
