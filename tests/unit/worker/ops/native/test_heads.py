"""Rotation and cache writes on every set of instructions, compared with the `reference` backend.

Of types, layouts, dimensions and norms every pair is computed; the other combinations are left to `make proofs`. A
result in bfloat16 is rounded once, so it is within 2^-8 of what float32 gives for the same arguments.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from services.worker.forward.kv_cache import KvCache, KvCacheSpec, attention_cache
from services.worker.ops import HeadNorms, Ops, RopeRows, load_ops
from services.worker.ops.native.backend import NativeOps
from tests.support.kernels.attention_batches import Batch, random
from tests.support.pairwise import every_pair

REFERENCE = load_ops("reference")
NUM_HEADS, NUM_KV_HEADS = 6, 2
BATCH = Batch(16, [0, 20, 3], [1, 5, 30], order=1)
TYPES = (torch.float32, torch.bfloat16)
BOTH = (False, True)
# (head dim, rotated columns): whole vectors, parts of them, and heads of which some columns are not rotated.
DIMS = ((16, 16), (20, 20), (64, 64), (80, 32), (128, 128), (256, 64))
both_types = pytest.mark.parametrize("dtype", TYPES)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Assert that `actual` is `expected`, computed in float32, but for rounding."""
    tolerance = 2**-8 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.float(), expected, atol=1e-5 * float(expected.abs().max()), rtol=tolerance)


def rope_rows(ops: Ops, rotary_dim: int, *, is_interleaved: bool) -> RopeRows:
    """Rotations for the tokens of `BATCH`."""
    angles = torch.outer(torch.arange(100.0), 0.9 ** torch.arange(rotary_dim // 2))
    positions = torch.tensor([0, *range(20, 25), *range(3, 33)])
    return ops.select_rope(ops.prepare_rope(angles.cos(), angles.sin(), is_interleaved=is_interleaved), positions)


@every_pair(dtype=TYPES, is_interleaved=BOTH, dims=DIMS)
def test_rope_is_the_references_and_leaves_other_columns(
    ops: NativeOps, dtype: torch.dtype, is_interleaved: bool, dims: tuple[int, int]
) -> None:
    head_dim, rotary_dim = dims
    fused = random(BATCH.num_tokens, NUM_HEADS + 2, head_dim + 3).to(dtype)
    expected = fused.float().clone()
    rotate = slice(None), slice(1, NUM_HEADS), slice(head_dim)
    ops.rope(fused[rotate], rope_rows(ops, rotary_dim, is_interleaved=is_interleaved))
    REFERENCE.rope(expected[rotate], rope_rows(REFERENCE, rotary_dim, is_interleaved=is_interleaved))
    assert_close(fused, expected)


@every_pair(dtype=TYPES, is_interleaved=BOTH, dims=DIMS, norms=("none", "of the heads' type", "float32"))
def test_norm_rope_write_is_the_references(
    ops: NativeOps, dtype: torch.dtype, is_interleaved: bool, dims: tuple[int, int], norms: str
) -> None:
    head_dim, rotary_dim = dims
    has_norms, norm_dtype = norms != "none", torch.float32 if norms == "float32" else dtype
    qkv = random(BATCH.num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim).to(dtype)
    query_norm, key_norm = (random(head_dim, seed=seed).to(norm_dtype) for seed in (1, 2))
    metadata = BATCH.metadata()
    metadata.slot_mapping[7] = -1

    def run(backend: Ops, projected: Tensor, norms: HeadNorms) -> KvCache:
        cache = BATCH.make_cache(attention_cache(NUM_KV_HEADS, head_dim, projected.dtype), fill=7.0)
        backend.norm_rope_write(
            projected,
            norms if has_norms else None,
            rope_rows(backend, rotary_dim, is_interleaved=is_interleaved),
            num_heads=NUM_HEADS,
            cache=cache.layers[0],
            plan=backend.plan_attention(metadata, cache),
        )
        return cache

    expected = qkv.float().clone()
    expected_cache = run(REFERENCE, expected, HeadNorms(query_norm.float(), key_norm.float(), 1e-5))
    cache = run(ops, qkv, HeadNorms(query_norm, key_norm, 1e-5))
    assert_close(qkv[:, :NUM_HEADS], expected[:, :NUM_HEADS])
    for written, expected_tensor in zip(cache.layers[0], expected_cache.layers[0], strict=True):
        assert_close(written, expected_tensor)


@both_types
@pytest.mark.parametrize("head_dim", [head_dim for head_dim, _ in DIMS])
def test_a_cache_of_int8_holds_codes_and_the_scales_of_heads(ops: NativeOps, dtype: torch.dtype, head_dim: int) -> None:
    key, value = (random(BATCH.num_tokens, NUM_KV_HEADS, head_dim, seed=seed).to(dtype) for seed in (1, 2))
    key[2] = 0.0
    value[3, 1, 0] = math.inf
    cache = KvCache(KvCacheSpec((attention_cache(NUM_KV_HEADS, head_dim, torch.int8),)), BATCH.num_blocks, 16)
    plan = ops.plan_attention(BATCH.metadata(), cache)
    ops.write_kv(key, value, cache.layers[0], plan)
    slots = plan.metadata.slot_mapping
    for codes, scales, rows in zip(cache.layers[0][:2], cache.layers[0][2:], (key.float(), value.float()), strict=True):
        written, scale = codes.flatten(0, 1)[slots].float(), scales.flatten(0, 1)[slots]
        is_finite = rows.isfinite().all(-1)
        assert torch.equal(scale.isnan(), ~is_finite)
        assert_close(scale[is_finite], rows[is_finite].abs().amax(-1) / 127)
        # A code is the nearest to its value.
        errors = (written * scale.unsqueeze(-1) - rows).abs().amax(-1)
        assert (errors <= 0.5001 * scale)[is_finite].all()


def test_many_tokens_are_written_by_several_threads(ops: NativeOps, num_threads: int) -> None:
    batch = Batch(16, [0], [400], order=1)
    key, value = random(400, 4, 64), random(400, 4, 64, seed=1)
    cache = batch.make_cache(attention_cache(4, 64, torch.float32))
    plan = ops.plan_attention(batch.metadata(), cache)
    ops.write_kv(key, value, cache.layers[0], plan)
    for tensor, rows in zip(cache.layers[0], (key, value), strict=True):
        assert torch.equal(tensor.flatten(0, 1)[plan.metadata.slot_mapping], rows)


@both_types
def test_rows_of_any_width_and_stride_are_copied(ops: NativeOps, dtype: torch.dtype) -> None:
    values = random(BATCH.num_tokens, 50).to(dtype)[:, 3:40]
    cache = torch.zeros(BATCH.num_blocks, BATCH.block_size, 37, dtype=dtype)
    expected = cache.clone()
    metadata = BATCH.metadata()
    metadata.slot_mapping[3] = -1
    kv_cache = BATCH.make_cache(attention_cache(1, 16, dtype))
    ops.write_cache(values, cache, ops.plan_attention(metadata, kv_cache))
    REFERENCE.write_cache(values, expected, REFERENCE.plan_attention(metadata, kv_cache))
    assert torch.equal(cache, expected)
