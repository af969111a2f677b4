"""Attention of the `cpu` backend: a few calls per layer, each for a bucket of similar rows (see `plan`)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, AttentionPlan
from services.worker.forward.kv_cache import KvCache
from services.worker.ops.arguments import AttentionParams
from services.worker.ops.cpu.plan import (
    FEW_QUERIES,
    AttentionLayout,
    CausalBucket,
    CpuPlan,
    GatherBucket,
    Rows,
)

# Private to torch, so it may disappear; sinks then take a slower path.
_HAS_FLASH = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")


class GatherBuffers:
    """Contexts gathered from the paged cache: memory of all layers and steps, grown to the largest bucket seen."""

    def __init__(self) -> None:
        self.gathered_keys = torch.empty(0)
        self.gathered_values = torch.empty(0)


def plan_attention(metadata: AttentionMetadata, kv_cache: KvCache) -> CpuPlan:
    """Plan buckets, each when it is first needed."""
    return CpuPlan(metadata, kv_cache)


def write_kv(key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
    """Write keys, then values."""
    key_cache, value_cache = cache
    write_cache(key, key_cache, plan)
    write_cache(value, value_cache, plan)


def write_cache(values: Tensor, cache: Tensor, plan: AttentionPlan) -> None:
    """Copy the rows that have a slot."""
    assert isinstance(plan, CpuPlan)
    rows, slots = plan.written()
    by_slot(cache).index_copy_(0, slots, (values if rows is None else values[rows]).flatten(1))


def prefill_attention(
    buffers: GatherBuffers,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: tuple[Tensor, ...],
    plan: AttentionPlan,
    params: AttentionParams,
) -> Tensor:
    """Attend bucket by bucket, to the new tokens themselves where there are no others."""
    assert isinstance(plan, CpuPlan)
    layout = plan.layout(params.window)
    outputs = [causal_attention(query, key, value, bucket, params) for bucket in layout.causal]
    outputs += [_paged_attention(buffers, query, cache, bucket, params) for bucket in layout.gathered]
    return in_step_order(outputs, layout)


def decode_attention(
    buffers: GatherBuffers, query: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan, params: AttentionParams
) -> Tensor:
    """Attend bucket by bucket, to gathered contexts."""
    assert isinstance(plan, CpuPlan)
    layout = plan.layout(params.window)
    outputs = [_paged_attention(buffers, query, cache, bucket, params) for bucket in layout.gathered]
    return in_step_order(outputs, layout)


def _paged_attention(
    buffers: GatherBuffers, query: Tensor, cache: tuple[Tensor, ...], bucket: GatherBucket, params: AttentionParams
) -> Tensor:
    key_cache, value_cache = cache
    keys, buffers.gathered_keys = gather(key_cache, bucket, buffers.gathered_keys)
    values, buffers.gathered_values = gather(value_cache, bucket, buffers.gathered_values)
    return gathered_attention(query, keys, values, bucket, params)


def by_slot(cache: Tensor) -> Tensor:
    """A view of a cache tensor as [num_slots, elements of a token]."""
    return cache.view(cache.shape[0] * cache.shape[1], -1)


def take(x: Tensor, rows: Rows) -> Tensor:
    """Index with `rows`."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def gather(cache: Tensor, bucket: GatherBucket, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Read a bucket's contexts from a cache [num_blocks, block_size, *shape].

    Returns:
        ([num_rows, length, *shape], a view of the cache or the buffer; the buffer, replaced if it was too small).
    """
    contexts, slots = by_slot(cache), bucket.slots
    shape = (bucket.num_rows, bucket.length, *cache.shape[2:])
    if isinstance(slots, slice):
        return contexts[slots].view(shape), buffer
    size = len(slots) * contexts.shape[1]
    if buffer.numel() < size or buffer.dtype != contexts.dtype:
        buffer = contexts.new_empty(size)
    gathered = buffer[:size].view(len(slots), -1)
    torch.index_select(contexts, 0, slots, out=gathered)
    return gathered.view(shape), buffer


def in_step_order(outputs: list[Tensor], layout: AttentionLayout) -> Tensor:
    """Join buckets' results in the order of the step's tokens."""
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if layout.output_rows is None else joined.index_select(0, layout.output_rows)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, bucket: CausalBucket, params: AttentionParams
) -> Tensor:
    """Causal attention of prompts: query [T, H, D], key [T, K, D], value [T, K, V] to [bucket's tokens, H * V]."""

    def padded(x: Tensor) -> Tensor:
        rows = take(x, bucket.token_rows)
        return rows.view(bucket.num_rows, bucket.length, *rows.shape[1:]).transpose(1, 2)

    output = _attend(padded(query), padded(key), padded(value), params, is_causal=True)
    return output.transpose(1, 2).reshape(bucket.num_rows * bucket.length, -1)


def gathered_attention(
    query: Tensor, keys: Tensor, values: Tensor, bucket: GatherBucket, params: AttentionParams
) -> Tensor:
    """Attend to gathered contexts.

    Args:
        query: [T, H, D], all of the step.
        keys: [num_rows, length, K, D].
        values: [num_rows, length, K, V].

    Returns:
        [num_rows * num_queries, H * V].
    """
    num_rows, num_queries, head_dim = bucket.num_rows, bucket.num_queries, query.shape[-1]
    num_kv_heads = keys.shape[2]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    queries = take(query, bucket.query_rows)
    if num_queries == 1:
        # Query heads that share a key/value head are treated as its queries: one small matmul instead of several.
        grouped = queries.view(num_rows, num_kv_heads, -1, head_dim)
        return _attend(grouped, keys, values, params, mask=bucket.mask).reshape(num_rows, -1)
    queries = queries.view(num_rows, num_queries, -1, head_dim)
    if bucket.mask is not None and num_queries < FEW_QUERIES:
        return _grouped_attention(queries, keys, values, bucket.mask, params)
    if bucket.num_before and _HAS_FLASH and keys.shape[-1] == values.shape[-1]:
        return _continued_attention(queries, keys, values, bucket.num_before, params)
    output = _attend(queries.transpose(1, 2), keys, values, params, mask=bucket.mask)
    return output.transpose(1, 2).reshape(num_rows * num_queries, -1)


def _grouped_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """Treat query heads that share a key/value head as its queries.

    Args:
        query: [num_rows, num_queries, H, D].
        keys: [num_rows, K, length, D].
        values: [num_rows, K, length, V].
        mask: [num_rows, 1, num_queries, length].

    Returns:
        [num_rows * num_queries, H * V].
    """
    num_rows, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    grouped = query.view(num_rows, num_queries, num_kv_heads, group_size, head_dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num_rows, num_kv_heads, group_size * num_queries, head_dim)
    output = _attend(grouped, keys, values, params, mask=mask.repeat(1, 1, group_size, 1))
    output = output.view(num_rows, num_kv_heads, group_size, num_queries, -1)
    return output.permute(0, 3, 1, 2, 4).reshape(num_rows * num_queries, -1)


def _continued_attention(
    query: Tensor, keys: Tensor, values: Tensor, num_before: int, params: AttentionParams
) -> Tensor:
    """Attend from a prompt's next chunk: unmasked to the tokens before it, causally to itself.

    Without a mask there is less to compute, and heads can be grouped as in `_grouped_attention`: a quarter less time at
    8k tokens. The results are merged, weighted by their softmax sums. Source: arXiv:2205.14135, section 3.1.

    Args:
        query: [1, num_queries, H, D].
        keys: [1, K, num_before + num_queries, D].
        values: Likewise.

    Returns:
        [num_queries, H * D].
    """
    _, num_queries, num_heads, head_dim = query.shape
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query = query.transpose(1, 2)
    grouped = query.reshape(1, keys.shape[1], -1, head_dim)
    before, before_sum = flash(grouped, keys[:, :, :num_before], values[:, :, :num_before], scale=params.scale)
    before, before_sum = before.reshape(query.shape), before_sum.reshape(1, num_heads, num_queries)
    own, own_sum = flash(query, keys[:, :, num_before:], values[:, :, num_before:], 0.0, True, scale=params.scale)
    output = torch.lerp(before, own, torch.sigmoid(own_sum - before_sum).unsqueeze(-1).to(own.dtype))
    if params.sinks is not None:
        log_sum = torch.logaddexp(before_sum, own_sum)
        output *= torch.sigmoid(log_sum - params.sinks[:, None]).unsqueeze(-1)
    return output.transpose(1, 2).reshape(num_queries, -1)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    params: AttentionParams,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attention [B, H, Q, V] of query [B, H, Q, D], or of [B, K, H / K * Q, D] with each group's heads stacked."""
    if params.sinks is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=is_causal, scale=params.scale, enable_gqa=True
        )
    num_heads, num_queries = query.shape[1:3]
    sinks = params.sinks.view(num_heads, -1)
    sinks = sinks.repeat_interleave(num_queries // sinks.shape[1], dim=1)
    if not _HAS_FLASH or keys.shape[-1] != values.shape[-1]:
        if is_causal:
            mask = torch.full((num_queries, num_queries), -math.inf, dtype=query.dtype).triu_(1)
        return _attend_with_all_scores(query * params.scale, keys, values, sinks, mask=mask)
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, is_causal, attn_mask=mask, scale=params.scale
    )
    # Without sinks a weight is e^score / e^log_sum. A sink makes the divisor e^log_sum + e^sink.
    scaled: Tensor = output.mul_(torch.sigmoid(log_sum - sinks).unsqueeze(-1))
    return scaled


def _attend_with_all_scores(
    query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, *, mask: Tensor | None
) -> Tensor:
    """Attention [B, H, Q, V] of the scaled query [B, H, Q, D], with `sinks` [H, Q]. Keeps all scores in memory."""
    group_size = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(group_size, dim=1).transpose(-1, -2)
    if mask is not None:
        scores += mask
    sink_scores = sinks[..., None].expand(*scores.shape[:-1], 1).to(scores.dtype)
    weights = torch.softmax(torch.cat((scores, sink_scores), dim=-1), dim=-1)[..., :-1]
    return weights @ values.repeat_interleave(group_size, dim=1)
