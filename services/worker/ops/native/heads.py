"""What lies between a layer's fused projection and its attention: kernels/heads.cpp."""

from __future__ import annotations

import ctypes
from struct import Struct

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionPlan
from services.worker.ops.arguments import HeadNorms, RopeRows
from services.worker.ops.native.attention import NativePlan
from services.worker.ops.native.formats import FORMATS

# The fields of `HeadsArgs`: query, key and value, sizes, norms, rotation, cache.
_heads = Struct("P3q Pq P2q 4q PPd PPP2q P4Pq").pack
_rows = Struct("PPP3q").pack
_NO_QUERY = 0, 0, 0, 0
_NO_KEYS = 0, 0, 0, 0, 0
_NO_NORMS = 0, 0, 0.0
_NO_ROTATION = 0, 0, 0, 0, 0
_NO_CACHE = 0, 0, 0, 0, 0, 0


class NativeHeads:
    """The section "Rotary position embedding" of `Ops`, and what writes to the cache."""

    _library: ctypes.CDLL

    def prepare_rope(self, cos: Tensor, sin: Tensor, *, is_interleaved: bool) -> RopeRows:
        positions = torch.empty(0, dtype=torch.int64)
        return RopeRows(cos.contiguous(), sin.contiguous(), positions, is_interleaved)

    def select_rope(self, tables: RopeRows, positions: Tensor) -> RopeRows:
        return RopeRows(tables.cos, tables.sin, positions.contiguous(), tables.is_interleaved)

    def rope(self, query_key: Tensor, rows: RopeRows) -> None:
        num_tokens, num_heads, head_dim = query_key.shape
        token_stride, head_stride, element_stride = query_key.stride()
        assert element_stride == 1
        query = query_key.data_ptr(), token_stride, head_stride, num_heads
        sizes = num_tokens, head_dim, head_dim, FORMATS[query_key.dtype]
        self._library.ls_write_heads(_heads(*query, *_NO_KEYS, *sizes, *_NO_NORMS, *_rotation(rows), *_NO_CACHE))

    def norm_rope_write(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        rows: RopeRows,
        *,
        num_heads: int,
        cache: tuple[Tensor, ...],
        plan: AttentionPlan,
    ) -> None:
        # The key goes only to the cache, where `prefill_attention` reads it.
        num_tokens, num_all_heads, head_dim = qkv.shape
        num_kv_heads = (num_all_heads - num_heads) // 2
        token_stride, address, head_bytes = num_all_heads * head_dim, qkv.data_ptr(), head_dim * qkv.itemsize
        key = address + num_heads * head_bytes
        self._library.ls_write_heads(
            _heads(
                *(address, token_stride, head_dim, num_heads),
                *(key, token_stride, key + num_kv_heads * head_bytes, token_stride, num_kv_heads),
                *(num_tokens, head_dim, head_dim, FORMATS[qkv.dtype]),
                *(_NO_NORMS if norms is None else (norms.query.data_ptr(), norms.key.data_ptr(), norms.eps)),
                *_rotation(rows),
                *_written(cache, plan),
            )
        )

    def write_kv(self, key: Tensor, value: Tensor, cache: tuple[Tensor, ...], plan: AttentionPlan) -> None:
        num_tokens, num_kv_heads, head_dim = key.shape
        sizes = num_tokens, head_dim, value.shape[2], FORMATS[key.dtype]
        heads = key.data_ptr(), key.stride()[0], value.data_ptr(), value.stride()[0], num_kv_heads
        self._library.ls_write_heads(
            _heads(*_NO_QUERY, *heads, *sizes, *_NO_NORMS, *_NO_ROTATION, *_written(cache, plan))
        )

    def write_cache(self, values: Tensor, cache: Tensor, plan: AttentionPlan) -> None:
        assert isinstance(plan, NativePlan)
        row_bytes, stride = cache[0, 0].nbytes, values.stride()[0] * values.itemsize
        addresses = values.data_ptr(), cache.data_ptr(), plan.slot_mapping.data_ptr()
        self._library.ls_write_rows(_rows(*addresses, len(values), stride, row_bytes))


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
