"""The size of the KV cache and of its tensors."""

from __future__ import annotations

import pytest
import torch

from services.worker.forward.kv_cache import (
    CacheTensor,
    KvCache,
    KvCacheSpec,
    attention_cache,
    split_scales,
)

# 2 tensors * 3 layers * 2 heads * 8 elements * 4 bytes.
SPEC = KvCacheSpec((attention_cache(2, 8, torch.float32),) * 3)
# A latent, and keys of another dtype in the first layer only: 24 * 2 + 8 * 4 and 24 * 2 bytes.
LATENT = CacheTensor((24,), torch.bfloat16)
MIXED = KvCacheSpec(((LATENT, CacheTensor((8,), torch.float32)), (LATENT,)))


def test_a_token_needs_keys_and_values_in_every_layer() -> None:
    assert SPEC.bytes_per_token == 384
    assert KvCacheSpec((attention_cache(2, 8, torch.bfloat16),) * 3).bytes_per_token == 192


def test_codes_of_int8_come_with_a_scale_for_each_head() -> None:
    # 2 tensors * 3 layers * 2 heads * (8 codes + 4 bytes).
    assert KvCacheSpec((attention_cache(2, 8, torch.int8),) * 3).bytes_per_token == 144
    keys, values, key_scales, value_scales = KvCache(KvCacheSpec((attention_cache(2, 8, torch.int8),)), 5, 4).layers[0]
    assert keys.shape == values.shape == (5, 4, 2, 8)
    assert key_scales.shape == value_scales.shape == (5, 4, 2)
    assert (keys.dtype, key_scales.dtype) == (torch.int8, torch.float32)


def test_fp8_holds_twice_the_tokens_of_bfloat16() -> None:
    plain, coded = (KvCacheSpec((attention_cache(2, 8, dtype),) * 3) for dtype in (torch.bfloat16, torch.float8_e4m3fn))
    assert 2 * coded.bytes_per_token == plain.bytes_per_token
    cache = KvCache(coded, num_blocks=5, block_size=4).layers[0]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in cache] == [((5, 4, 2, 8), torch.float8_e4m3fn)] * 2


def test_a_cache_may_have_scales() -> None:
    tensors = tuple(torch.zeros(1) for _ in range(4))
    assert split_scales(tensors) == tensors
    assert split_scales(tensors[:2]) == (*tensors[:2], None, None)


def test_a_token_needs_the_entries_of_each_layer() -> None:
    assert MIXED.bytes_per_token == 128


@pytest.mark.parametrize("spec", [SPEC, MIXED])
def test_the_tensors_have_the_expected_size_and_are_zero(spec: KvCacheSpec) -> None:
    cache = KvCache(spec, num_blocks=5, block_size=16)
    assert [[(tuple(tensor.shape), tensor.dtype) for tensor in layer] for layer in cache.layers] == [
        [((5, 16, *tensor.shape), tensor.dtype) for tensor in layer] for layer in spec.layers
    ]
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert sum(tensor.nbytes for tensor in tensors) == 5 * 16 * spec.bytes_per_token
    assert not any(tensor.any() for tensor in tensors)
    assert all(tensor.is_contiguous() for tensor in tensors)


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        KvCache(SPEC, num_blocks=0, block_size=16)
