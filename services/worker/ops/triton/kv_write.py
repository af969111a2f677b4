"""Writes a step's tokens into their slots of the paged KV cache."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from services.worker.forward.kv_cache import split_scales
from services.worker.ops.triton.e4m3 import to_e4m3

# Eight elements per thread of two warps: one load of 16 bytes of bfloat16.
_COLUMNS = 512
_NUM_WARPS = 2


@triton.jit
def store_cached(places, values, mask, scale):
    """Store `values` in a cache: as they are, or if there is a `scale` as codes of E4M3."""
    if scale is None:
        tl.store(places, values, mask=mask)
    else:
        # Divided like this, all GPUs have the same bits.
        codes = to_e4m3(values, tl.div_rn(1.0, tl.load(scale)))
        tl.store(places.to(tl.pointer_type(tl.uint8), bitcast=True), codes, mask=mask)


@triton.jit
def _copy_row(values, value_stride, cache, scale, slot, token, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    row = tl.load(values + token * value_stride + columns, mask=mask, other=0.0)
    store_cached(cache + slot * WIDTH + columns, row, mask, scale)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_cache_kernel(values, cache, slot_mapping, value_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        _copy_row(values, value_stride, cache, None, slot, token, WIDTH, COLUMNS)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    slot_mapping,
    key_stride,
    value_stride,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        _copy_row(key, key_stride, key_cache, key_scale, slot, token, KEY_WIDTH, COLUMNS)
        _copy_row(value, value_stride, value_cache, value_scale, slot, token, VALUE_WIDTH, COLUMNS)


def write_kv(key: Tensor, value: Tensor, cache: tuple[Tensor, ...], slot_mapping: Tensor) -> None:
    """See `Ops.write_kv`.

    Args:
        key: [T, K, D], each token's part contiguous. Not written.
        value: [T, K, V], likewise.
        cache: Keys [num_blocks, block_size, K, D] and values [num_blocks, block_size, K, V], contiguous, of the dtype
            of `key` and `value`, or in float8_e4m3fn with their scales [1] float32. Both are written in place.
        slot_mapping: [T] int64, no repeats; -1 is skipped.

    Source: arXiv:2309.06180, section 4.1.
    """
    key_width, value_width = math.prod(key.shape[1:]), math.prod(value.shape[1:])
    columns = _num_columns(max(key_width, value_width))
    _write_kv_kernel[(len(key), triton.cdiv(max(key_width, value_width), columns))](
        key,
        value,
        *split_scales(cache),
        slot_mapping,
        key.stride(0),
        value.stride(0),
        KEY_WIDTH=key_width,
        VALUE_WIDTH=value_width,
        COLUMNS=columns,
        num_warps=_NUM_WARPS,
    )


def write_cache(values: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """See `Ops.write_cache`.

    Args:
        values: [T, ...], each token's part contiguous. Not written.
        cache: [num_blocks, block_size, ...], contiguous, of the dtype of `values`; written in place.
        slot_mapping: [T] int64, no repeats; -1 is skipped.
    """
    width = math.prod(values.shape[1:])
    columns = _num_columns(width)
    _write_cache_kernel[(len(values), triton.cdiv(width, columns))](
        values, cache, slot_mapping, values.stride(0), WIDTH=width, COLUMNS=columns, num_warps=_NUM_WARPS
    )


def _num_columns(width: int) -> int:
    return min(triton.next_power_of_2(width), _COLUMNS)
