"""The cache kernels write each token into its slot, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from services.worker.forward.forward_context import AttentionPlan
from services.worker.ops import load_ops
from services.worker.ops.triton.kv_write import write_cache, write_kv
from tests.support.kernels.attention_batches import random
from tests.support.kernels.paged_attention import FP8
from tests.support.models.paged_model import attention_metadata
from tests.support.pairwise import every_pair

SLOTS = torch.tensor([5, -1, 2, 0, 11])
OTHERS = [slot for slot in range(12) if slot not in SLOTS]


@every_pair(
    block_size=[1, 3, 4], shape=[(1, 16, 16), (3, 80, 24), (8, 128, 128)], dtype=[torch.float32, torch.bfloat16]
)
def test_write_kv_writes_tokens_with_a_slot(block_size: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_kv_heads, key_dim, value_dim = shape
    fused = random(5, num_kv_heads * (key_dim + value_dim) + 7).to(dtype)
    sizes = [num_kv_heads * key_dim, num_kv_heads * value_dim, 7]
    key, value, _ = torch.split(fused, sizes, dim=1)
    cache = tuple(
        torch.full((12 // block_size, block_size, num_kv_heads, dim), 7.0, dtype=dtype) for dim in (key_dim, value_dim)
    )
    write_kv(key.view(5, num_kv_heads, -1), value.view(5, num_kv_heads, -1), cache, SLOTS)
    for rows, tensor in zip((key, value), cache, strict=True):
        written = tensor.view(12, -1)
        assert torch.equal(written[SLOTS[SLOTS >= 0]], rows[SLOTS >= 0])
        assert bool((written[OTHERS] == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in multiply")
def test_write_kv_makes_the_codes_of_fp8_that_the_reference_backend_makes(dtype: torch.dtype) -> None:
    key, value = (20 * random(5, 3, dim, seed=dim).to(dtype) for dim in (80, 24))
    # A token each: too large for a code, none of the others; not a number; infinite.
    key[0, 1, 5], value[2, 0, 7], key[3, 2, 1] = -1e6, math.nan, math.inf
    caches = [
        (*(torch.full((4, 3, 3, dim), 7.0).to(FP8) for dim in (80, 24)), torch.tensor([0.37]), torch.tensor([5.0]))
        for _ in range(2)
    ]
    write_kv(key, value, caches[0], SLOTS)
    metadata = attention_metadata([[0]], [len(SLOTS)], [len(SLOTS)], block_size=len(SLOTS), is_prefill=True)
    metadata.slot_mapping.copy_(SLOTS)
    load_ops("reference").write_kv(key, value, caches[1], AttentionPlan(metadata))
    for written, expected in zip(*caches, strict=True):
        torch.testing.assert_close(written.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    keys, values = (tensor.float().flatten(0, 1) for tensor in caches[0][:2])
    assert keys[5, 1, 5] == -448
    assert keys.isnan().nonzero().tolist() == [[0, 2, 1]]
    assert values.isnan().nonzero().tolist() == [[2, 0, 7]]


@pytest.mark.parametrize("shape", [(600,), (2, 24)])
def test_write_cache_writes_one_tensor(shape: tuple[int, ...]) -> None:
    values, cache = random(5, 2, *shape)[:, 1], torch.full((4, 3, *shape), 7.0)
    write_cache(values, cache, SLOTS)
    written = cache.flatten(0, 1)
    assert torch.equal(written[SLOTS[SLOTS >= 0]], values[SLOTS >= 0])
    assert bool((written[OTHERS] == 7.0).all())
