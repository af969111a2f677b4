"""What lies between a layer's fused projection and its attention: kernels/heads.cpp."""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionPlan
from services.worker.ops.arguments import HeadNorms, RopeRows
from services.worker.ops.native.attention import NativePlan
from services.worker.ops.native.formats import FORMATS
from services.worker.ops.native.state import NativeState

# The fields of `HeadsArgs`: query, key and value, sizes, norms, rotation, cache.
_heads = Struct("P3q Pq P2q 4q PPdq PPP2q P4Pq").pack
_rows = Struct("PPP3q").pack
_NO_QUERY = 0, 0, 0, 0
_NO_KEYS = 0, 0, 0, 0, 0
_NO_NORMS = 0, 0, 0.0, 0
_NO_ROTATION = 0, 0, 0, 0, 0
_NO_CACHE = 0, 0, 0, 0, 0, 0


def prepare_rope(cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
    """Keep the whole tables."""
    positions = torch.empty(0, dtype=torch.int64)
    return RopeRows(cos.contiguous(), sin.contiguous(), positions, is_interleaved)


def select_rope(tables: RopeRows, positions: Tensor) -> RopeRows:
    """Keep the whole tables, which the kernel reads at the step's positions."""
    return RopeRows(tables.cos, tables.sin, positions.contiguous(), tables.is_interleaved)


def rope(native: NativeState, query_key: Tensor, rows: RopeRows) -> None:
    """Rotate heads of any stride."""
    num_tokens, num_heads, head_dim = query_key.shape
    token_stride, head_stride, element_stride = query_key.stride()
    assert element_stride == 1
    query = query_key.data_ptr(), token_stride, head_stride, num_heads
    sizes = num_tokens, head_dim, head_dim, FORMATS[query_key.dtype]
    native.library.ls_write_heads(_heads(*query, *_NO_KEYS, *sizes, *_NO_NORMS, *_rotation(rows), *_NO_CACHE))


def norm_rope_write(
    native: NativeState,
    qkv: Tensor,
    norms: HeadNorms | None,
    rows: RopeRows,
    *,
    num_heads: int,
    cache: tuple[Tensor, ...],
    plan: AttentionPlan,
) -> None:
    """Compute all in one pass."""
    # The key goes only to the cache, where `prefill_attention` reads it.
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = (num_all_heads - num_heads) // 2
    token_stride, address, head_bytes = num_all_heads * head_dim, qkv.data_ptr(), head_dim * qkv.itemsize
    key = address + num_heads * head_bytes
    native.library.ls_write_heads(
        _heads(
            *(address, token_stride, head_dim, num_heads),
            *(key, token_stride, key + num_kv_heads * head_bytes, token_stride, num_kv_heads),
            *(num_tokens, head_dim, head_dim, FORMATS[qkv.dtype]),
            *(_NO_NORMS if norms is None else _norms(norms)),
            *_rotation(rows),
            *_written(cache, plan),
        )
    )


def write_kv(native: NativeState, key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
    """Write keys and values in one pass, in the format of the cache."""
    num_tokens, num_kv_heads, head_dim = key.shape
    sizes = num_tokens, head_dim, value.shape[2], FORMATS[key.dtype]
    heads = key.data_ptr(), key.stride()[0], value.data_ptr(), value.stride()[0], num_kv_heads
    native.library.ls_write_heads(_heads(*_NO_QUERY, *heads, *sizes, *_NO_NORMS, *_NO_ROTATION, *_written(cache, plan)))


def write_cache(native: NativeState, values: Tensor, cache: Tensor, plan: AttentionPlan) -> None:
    """Copy rows of any stride."""
    assert isinstance(plan, NativePlan)
    row_bytes, stride = cache[0, 0].nbytes, values.stride()[0] * values.itemsize
    addresses = values.data_ptr(), cache.data_ptr(), plan.slot_mapping.data_ptr()
    native.library.ls_write_rows(_rows(*addresses, len(values), stride, row_bytes))


def _norms(norms: HeadNorms) -> tuple[int, int, float, int]:
    return norms.query.data_ptr(), norms.key.data_ptr(), norms.eps, FORMATS[norms.query.dtype]


def _rotation(rows: RopeRows) -> tuple[int, ...]:
    addresses = rows.cos.data_ptr(), rows.sin.data_ptr(), rows.positions.data_ptr()
    return *addresses, rows.cos.shape[1], rows.is_interleaved


def _written(cache: tuple[Tensor, ...], plan: AttentionPlan) -> tuple[int, ...]:
    """Slots, keys, values, their scales, and their format."""
    assert isinstance(plan, NativePlan)
    slots, cache_format = plan.slot_mapping.data_ptr(), FORMATS[cache[0].dtype]
    if len(cache) == 2:
        return slots, cache[0].data_ptr(), cache[1].data_ptr(), 0, 0, cache_format
    keys, values, key_scales, value_scales = (tensor.data_ptr() for tensor in cache)
    return slots, keys, values, key_scales, value_scales, cache_format
