"""The `cpu` backend: batched torch kernels, one call per layer for all rows.

An eager layer costs dispatch, so there are few calls and they are large; weights are packed once by oneDNN, which
halves a decode step in float32. A row's bits depend on the batch it is in.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.forward_context import AttentionMetadata, AttentionPlan
from services.worker.kv_cache import KvCache
from services.worker.ops.cpu_plan import FEW_QUERIES, CausalBucket, CpuPlan, GatherBucket, Rows
from services.worker.ops.protocol import LinearKernel, RopeRows

# Private to torch, so it may go; `F.linear` then takes its place.
_HAS_PACKED_LINEAR = all(hasattr(torch.ops.mkldnn, op) for op in ("_reorder_linear_weight", "_linear_pointwise"))


class CpuOps:
    """See `Ops` for what each method computes."""

    name = "cpu"
    is_exact = False

    def __init__(self) -> None:
        # Context gathered from the paged cache, reused by every layer and step; grows to the largest bucket seen.
        self._key_buffer = torch.empty(0)
        self._value_buffer = torch.empty(0)

    def numerics(self) -> str:
        packing = "onednn" if _HAS_PACKED_LINEAR else "plain"
        capability = torch.backends.cpu.get_cpu_capability()
        return f"cpu torch-{torch.__version__} {packing} {capability} threads-{torch.get_num_threads()}"

    # -- Weights ------------------------------------------------------------------------------------------

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        if not _can_pack(weight.dtype):
            return partial(F.linear, weight=weight.clone(), bias=bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        return partial(_packed_linear, packed=packed, bias=bias)

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(token_ids, weight)

    # -- Elementwise and norm -----------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return F.rms_norm(residual, weight.shape, weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    # -- Rotary position embedding ------------------------------------------------------------------------

    def prepare_rope(self, cos: Tensor, sin: Tensor) -> RopeRows:
        # Over the whole head, with the sign of the rotated half in the sine: `rope` is then three calls.
        return RopeRows(
            cos=torch.cat((cos, cos), dim=-1).unsqueeze(1),
            sin=torch.cat((-sin, sin), dim=-1).unsqueeze(1),
            positions=torch.empty(0, dtype=torch.int64),
        )

    def select_rope(self, tables: RopeRows, positions: Tensor) -> RopeRows:
        return RopeRows(tables.cos.index_select(0, positions), tables.sin.index_select(0, positions), positions)

    def rope(self, query_key: Tensor, rows: RopeRows) -> None:
        swapped = torch.roll(query_key, query_key.shape[-1] // 2, dims=-1)
        query_key.mul_(rows.cos).addcmul_(swapped, rows.sin)

    # -- Attention ----------------------------------------------------------------------------------------

    def plan_attention(self, metadata: AttentionMetadata, kv_cache: KvCache) -> CpuPlan:
        return CpuPlan(metadata, kv_cache)

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan) -> None:
        assert isinstance(plan, CpuPlan)
        if plan.written_rows is not None:
            key, value = key[plan.written_rows], value[plan.written_rows]
        _by_slot(key_cache).index_copy_(0, plan.written_slots, key.flatten(1))
        _by_slot(value_cache).index_copy_(0, plan.written_slots, value.flatten(1))

    def prefill_attention(
        self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan
    ) -> Tensor:
        assert isinstance(plan, CpuPlan)
        outputs = [_causal_attention(query, key, value, bucket) for bucket in plan.causal]
        outputs += [self._gathered_attention(query, key_cache, value_cache, bucket) for bucket in plan.gathered]
        return _in_step_order(outputs, plan)

    def decode_attention(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan) -> Tensor:
        assert isinstance(plan, CpuPlan)
        outputs = [self._gathered_attention(query, key_cache, value_cache, bucket) for bucket in plan.gathered]
        return _in_step_order(outputs, plan)

    def _gathered_attention(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, bucket: GatherBucket
    ) -> Tensor:
        num_rows, num_queries = bucket.num_rows, bucket.num_queries
        num_heads, head_dim = query.shape[1:]
        num_kv_heads = key_cache.shape[2]
        keys, values = self._gather(key_cache, value_cache, bucket.slots)
        shape = (num_rows, bucket.length, num_kv_heads, head_dim)
        keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
        if num_queries == 1:
            # The query heads of a key/value head as if they were its queries: one small matmul instead of several.
            grouped = _take(query, bucket.query_rows).view(num_rows, num_kv_heads, -1, head_dim)
            output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bucket.mask)
            return output.reshape(num_rows, num_heads * head_dim)
        padded = _take(query, bucket.query_rows).view(num_rows, num_queries, num_heads, head_dim)
        if bucket.mask is not None and num_queries < FEW_QUERIES:
            return _grouped_attention(padded, keys, values, bucket.mask)
        padded = padded.transpose(1, 2)
        output = F.scaled_dot_product_attention(padded, keys, values, attn_mask=bucket.mask, enable_gqa=True)
        return output.transpose(1, 2).reshape(-1, num_heads * head_dim)

    def _gather(self, key_cache: Tensor, value_cache: Tensor, slots: Rows) -> tuple[Tensor, Tensor]:
        keys, values = _by_slot(key_cache), _by_slot(value_cache)
        if isinstance(slots, slice):
            return keys[slots], values[slots]
        size = len(slots) * keys.shape[1]
        if self._key_buffer.numel() < size or self._key_buffer.dtype != keys.dtype:
            self._key_buffer, self._value_buffer = keys.new_empty(size), keys.new_empty(size)
        key_buffer = self._key_buffer[:size].view(len(slots), -1)
        value_buffer = self._value_buffer[:size].view(len(slots), -1)
        torch.index_select(keys, 0, slots, out=key_buffer)
        torch.index_select(values, 0, slots, out=value_buffer)
        return key_buffer, value_buffer

    # -- Sampling -----------------------------------------------------------------------------------------

    def greedy_sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        largest, token_ids = logits.max(dim=-1)
        return token_ids, largest


def _can_pack(dtype: torch.dtype) -> bool:
    if not _HAS_PACKED_LINEAR:
        return False
    # Without the processor's own instructions oneDNN refuses bfloat16.
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed_linear(x: Tensor, *, packed: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return output


def _by_slot(cache: Tensor) -> Tensor:
    """The cache as [num_slots, K * D]."""
    return cache.view(cache.shape[0] * cache.shape[1], -1)


def _take(x: Tensor, rows: Rows) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, bucket: CausalBucket) -> Tensor:
    def padded(x: Tensor) -> Tensor:
        rows = _take(x, bucket.token_rows)
        return rows.view(bucket.num_rows, bucket.length, *rows.shape[1:]).transpose(1, 2)

    output = F.scaled_dot_product_attention(padded(query), padded(key), padded(value), is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).reshape(bucket.num_rows * bucket.length, -1)


def _grouped_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """The query heads of a key/value head as if they were its queries, as with one query each.

    Args:
        query: [num_rows, num_queries, H, D].
        keys: [num_rows, K, length, D].
        values: Likewise.
        mask: [num_rows, 1, num_queries, length].

    Returns:
        [num_rows * num_queries, H * D].
    """
    num_rows, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group_size = num_heads // num_kv_heads
    grouped = query.view(num_rows, num_queries, num_kv_heads, group_size, head_dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num_rows, num_kv_heads, group_size * num_queries, head_dim)
    output = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask.repeat(1, 1, group_size, 1))
    output = output.view(num_rows, num_kv_heads, group_size, num_queries, head_dim)
    return output.permute(0, 3, 1, 2, 4).reshape(num_rows * num_queries, num_heads * head_dim)


def _in_step_order(outputs: list[Tensor], plan: CpuPlan) -> Tensor:
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if plan.output_rows is None else joined.index_select(0, plan.output_rows)
