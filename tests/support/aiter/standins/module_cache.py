"""Stands in for AITER's KV writes. Source: AITER, csrc/kernels/cache_kernels.cu."""

from __future__ import annotations

import torch
from torch import Tensor


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """reshape_and_cache_flash(arg0: torch.Tensor, arg1: torch.Tensor, arg2: torch.Tensor, arg3: torch.Tensor, arg4: torch.Tensor, arg5: str, arg6: torch.Tensor, arg7: torch.Tensor) -> None"""
    _check_slots(slot_mapping, kv_cache_dtype, key, key_cache)
    for each, cache in ((key, key_cache), (value, value_cache)):
        # Packed keys have five dimensions, and other layouts have heads before tokens.
        if cache.dim() != 4 or not cache.is_contiguous() or cache.shape[2:] != each.shape[1:]:
            raise RuntimeError(f"the cache is not in flash layout: {tuple(cache.shape)} for {tuple(each.shape)}")
        _check_rows(each)
    if key_cache.stride(0) != value_cache.stride(0):
        raise RuntimeError("key_cache.stride(0) == value_cache.stride(0)")
    if k_scale.numel() != 1 or v_scale.numel() != 1:
        raise RuntimeError("one scale for keys and one for values")
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored]
    key_cache.flatten(0, 1)[slots] = key[is_stored]
    value_cache.flatten(0, 1)[slots] = value[is_stored]


def _check_slots(slot_mapping: Tensor, kv_cache_dtype: str, key: Tensor, key_cache: Tensor) -> None:
    if slot_mapping.dtype != torch.int64:
        raise RuntimeError(f"expected scalar type Long but found {slot_mapping.dtype}")
    if kv_cache_dtype != "auto" or key_cache.dtype != key.dtype:
        raise RuntimeError(f"Unsupported data type of kv cache: {kv_cache_dtype}")


def _check_rows(each: Tensor) -> None:
    if each.stride()[1:] != (each.shape[2], 1):
        raise RuntimeError(f"a token's heads are not contiguous: {each.stride()}")
