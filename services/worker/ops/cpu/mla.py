"""Latent attention of the `cpu` backend, dense and sparse.

Kernels need values as wide as keys, so whole rows of the latent cache serve as both, and surplus columns of the result
are cut off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionPlan
from services.worker.ops.arguments import AttentionParams
from services.worker.ops.cpu.attention import (
    GatherBuffers,
    by_slot,
    causal_attention,
    gather,
    gathered_attention,
    in_step_order,
    take,
)
from services.worker.ops.cpu.plan import AttentionLayout, CpuPlan, GatherBucket, Rows

# Bounds the cache rows that sparse attention gathers in one round, as each token gathers its own rows.
_MAX_SPARSE_BYTES = 16 * 2**20
# Bounds the number of the indexer's scores in one round, before they are summed over heads.
_MAX_INDEX_SCORES = 8 * 2**20


def mla_attention(
    buffers: GatherBuffers,
    query: Tensor,
    latent_cache: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    value_dim: int,
    selected: Tensor | None = None,
) -> Tensor:
    """Attend bucket by bucket; sparse, each token to a copy of what it selected."""
    assert isinstance(plan, CpuPlan)
    params, latents = AttentionParams(scale), latent_cache.unsqueeze(2)
    if selected is None:
        output = _dense_attention(buffers, query, latents, plan, params)
    else:
        output = _sparse_attention(buffers, query, latents, plan, params, selected=selected)
    return output.view(*query.shape[:2], -1)[..., :value_dim].contiguous()


def select_context(
    buffers: GatherBuffers,
    index_query: Tensor,
    index_weights: Tensor,
    index_cache: Tensor,
    plan: AttentionPlan,
    *,
    num_selected: int,
) -> Tensor | None:
    """Select bucket by bucket; None if no context is long enough."""
    assert isinstance(plan, CpuPlan)
    if plan.metadata.max_context_len <= num_selected:
        return None
    layout, positions = plan.layout(), plan.positions()
    outputs = []
    for rows, keys in _contexts(buffers, index_cache, plan, layout):
        query, weights, last_seen = (_by_row(take(x, rows), len(keys)) for x in (index_query, index_weights, positions))
        outputs.append(_select(query, weights, keys.float(), last_seen, num_selected=num_selected))
    return in_step_order(outputs, layout)


def _contexts(
    buffers: GatherBuffers, cache: Tensor, plan: CpuPlan, layout: AttentionLayout
) -> Iterator[tuple[Rows, Tensor]]:
    """Each bucket's tokens, and what they may attend to in a cache, [num_rows, length, *shape]."""
    if layout.causal:
        new = _new_rows(cache, plan)
        for prompts in layout.causal:
            yield prompts.token_rows, _by_row(take(new, prompts.token_rows), prompts.num_rows)
    for bucket in layout.gathered:
        context, buffers.gathered_keys = gather(cache, bucket, buffers.gathered_keys)
        yield bucket.query_rows, context


def _dense_attention(
    buffers: GatherBuffers, query: Tensor, latents: Tensor, plan: CpuPlan, params: AttentionParams
) -> Tensor:
    layout = plan.layout()
    outputs = []
    if layout.causal:
        new = _new_rows(latents, plan)
        outputs = [causal_attention(query, new, new, bucket, params) for bucket in layout.causal]
    outputs += [_latent_attention(buffers, query, latents, bucket, params) for bucket in layout.gathered]
    return in_step_order(outputs, layout)


def _sparse_attention(
    buffers: GatherBuffers, query: Tensor, latents: Tensor, plan: CpuPlan, params: AttentionParams, *, selected: Tensor
) -> Tensor:
    size = max(1, _MAX_SPARSE_BYTES // (selected.shape[1] * latents.shape[-1] * latents.element_size()))
    outputs = []
    for start in range(0, len(query), size):
        rows = slice(start, min(start + size, len(query)))
        bucket = _sparse_bucket(plan, rows, selected[rows], query.dtype)
        outputs.append(_latent_attention(buffers, query, latents, bucket, params))
    return torch.cat(outputs)


def _latent_attention(
    buffers: GatherBuffers, query: Tensor, latents: Tensor, bucket: GatherBucket, params: AttentionParams
) -> Tensor:
    keys, buffers.gathered_keys = gather(latents, bucket, buffers.gathered_keys)
    return gathered_attention(query, keys, keys, bucket, params)


def _by_row(x: Tensor, num_rows: int) -> Tensor:
    """A view of `x` [num_rows * n, ...] as [num_rows, n, ...]."""
    return x.view(num_rows, -1, *x.shape[1:])


def _new_rows(cache: Tensor, plan: CpuPlan) -> Tensor:
    """What the step's tokens have just written, [T, *shape]; undefined for padded tokens."""
    return by_slot(cache).index_select(0, plan.metadata.slot_mapping.clamp(min=0)).view(-1, *cache.shape[2:])


def _sparse_bucket(plan: CpuPlan, rows: slice, selected: Tensor, dtype: torch.dtype) -> GatherBucket:
    """Each of the tokens `rows` alone, over the positions it selected."""
    is_unused = selected < 0
    mask = torch.zeros(selected.shape, dtype=dtype).masked_fill_(is_unused, float("-inf"))
    return GatherBucket(
        query_rows=rows,
        num_rows=len(selected),
        num_queries=1,
        length=selected.shape[1],
        slots=plan.slots(rows, selected.clamp(min=0)).flatten(),
        mask=mask[:, None, None] if bool(is_unused.any()) else None,
    )


def _select(query: Tensor, weights: Tensor, keys: Tensor, last_seen: Tensor, *, num_selected: int) -> Tensor:
    """The best positions for a bucket's queries, [B * Q, num_selected] int64, filled up with -1.

    Args:
        query: [B, Q, Hi, Di].
        weights: [B, Q, Hi] float32.
        keys: [B, S, Di] float32.
        last_seen: [B, Q] int64, the last position a query may see.
    """
    num_rows, num_queries, num_heads, _ = query.shape
    size = max(1, _MAX_INDEX_SCORES // (num_rows * num_heads * keys.shape[1]))
    selected = torch.full((num_rows, num_queries, num_selected), -1)
    for start in range(0, num_queries, size):
        part = slice(start, start + size)
        seen = last_seen[:, part, None]
        # Keys after the last one that any query of the part may see need no score.
        scores = _index_scores(query[:, part], weights[:, part], keys[:, : max(int(seen.max()), 0) + 1])
        scores.masked_fill_(torch.arange(scores.shape[-1]) > seen, float("-inf"))
        best = largest_columns(scores, min(num_selected, scores.shape[-1]))
        selected[:, part, : best.shape[-1]] = best.masked_fill_(best > seen, -1)
    return selected.flatten(0, 1)


def _index_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[B, Q, S] float32: `sum over h of weights[h] * relu(query[h] . key)`."""
    num_rows, num_queries, num_heads, _ = query.shape
    products = torch.bmm(query.flatten(1, 2).float(), keys.transpose(1, 2)).relu_()
    weighted = torch.bmm(weights.reshape(-1, 1, num_heads), products.view(num_rows * num_queries, num_heads, -1))
    return weighted.view(num_rows, num_queries, -1)


def largest_columns(scores: Tensor, count: int) -> Tensor:
    """Columns of each row's `count` largest values, in any order, the lower among equals; NaN counts as infinity.

    `topk` takes any of equal values, so each float32 becomes an integer of the same order with the column in its lower
    half. A stable sort of whole rows takes four times as long.
    """
    num_columns = scores.shape[-1]
    # NaN may have either sign. Adding 0.0 turns -0.0 into 0.0.
    bits = (scores.nan_to_num(math.inf, math.inf, -math.inf) + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    keys = (ordered << 32) | torch.arange(num_columns - 1, -1, -1, device=scores.device)
    return num_columns - 1 - (keys.topk(count, dim=-1, sorted=False).values & 0xFFFFFFFF)
