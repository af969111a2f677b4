"""Attention on every set of instructions and several numbers of threads, compared with the `reference` backend.

The reference computes in float32 from the same keys and values, so results differ by rounding only: in float32 by the
order of sums; in bfloat16 by a rounding of the result, within 2^-8 of it, and of each weight where the processor
multiplies bfloat16, within 2^-8 of it: weights add up to 1, so that is within 2^-8 of the largest value.

Of steps, types, heads and threads every pair is computed; the other combinations are left to `make proofs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.forward.kv_cache import CacheTensor, KvCache, KvCacheSpec, LayerCache
from services.worker.ops import AttentionParams, load_ops
from services.worker.ops.native.backend import NativeOps
from tests.support.kernels.attention_batches import Batch, random
from tests.support.pairwise import every_pair

REFERENCE = load_ops("reference")
FLOAT32, BFLOAT16, INT8 = torch.float32, torch.bfloat16, torch.int8
NUMS_THREADS = (1, 2, 4)


@dataclass(frozen=True)
class Shape:
    """The heads of a layer, and how they are stored."""

    num_kv_heads: int
    group_size: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group_size

    def layer(self) -> LayerCache:
        """What a token stores."""
        layer = tuple(CacheTensor((self.num_kv_heads, dim), self.cache_dtype) for dim in (self.key_dim, self.value_dim))
        scales = CacheTensor((self.num_kv_heads,), FLOAT32)
        return (*layer, scales, scales) if self.cache_dtype == INT8 else layer

    def params(self, window: int | None, *, has_sinks: bool) -> AttentionParams:
        """A layer's parameters."""
        sinks = random(self.num_heads, seed=5) * 3 if has_sinks else None
        return AttentionParams(self.key_dim**-0.5, window, sinks)


def shapes() -> st.SearchStrategy[Shape]:
    """Groups from 1 to 40 heads, and heads of whole vectors and parts of them."""
    return st.tuples(
        st.integers(1, 3),
        st.sampled_from([1, 2, 3, 4, 7, 40]),
        st.sampled_from([16, 20, 64, 72, 80, 128, 256]),
        st.sampled_from([0, 0, 3]),
        st.sampled_from(
            [(FLOAT32, FLOAT32), (FLOAT32, BFLOAT16), (FLOAT32, INT8), (BFLOAT16, BFLOAT16), (BFLOAT16, INT8)]
        ),
    ).map(lambda size: Shape(size[0], size[1], size[2], size[2] - size[3], *size[4]))


def steps(*, max_new: int, max_cached: int) -> st.SearchStrategy[Batch]:
    """Steps of up to five sequences."""
    return st.integers(1, 5).flatmap(
        lambda size: st.builds(
            Batch,
            block_size=st.sampled_from([1, 16, 64]),
            num_cached=st.lists(st.integers(0, max_cached) | st.just(0), min_size=size, max_size=size),
            num_new=st.lists(st.integers(1, max_new) | st.just(1), min_size=size, max_size=size),
            order=st.integers(0, 1000),
        )
    )


any_steps = steps(max_new=1, max_cached=300) | steps(max_new=9, max_cached=200) | steps(max_new=150, max_cached=100)
windows = st.none() | st.integers(1, 200)


class CachedStep:
    """Random queries over contexts that are in the cache. All slots but those of the contexts hold NaN."""

    def __init__(self, batch: Batch, shape: Shape) -> None:
        self.metadata = batch.metadata()
        self.kv_cache = KvCache(KvCacheSpec((shape.layer(),)), batch.num_blocks, batch.block_size)
        contexts = Batch(batch.block_size, batch.context_lens, [0] * len(batch.num_new), batch.order)
        for seed, tensor in enumerate(self.kv_cache.layers[0]):
            tensor.fill_(99 if tensor.dtype == INT8 else math.nan)
            rows = contexts.contexts(*tensor.shape[2:], seed=seed)
            if tensor.dtype == INT8:
                rows = [(row * 50).clamp(-127, 127) for row in rows]
            elif shape.cache_dtype == INT8:
                rows = [row.abs() / 50 for row in rows]
            contexts.fill_cached(self.metadata, tensor, [row.to(tensor.dtype) for row in rows])
        heads = random(batch.num_tokens, shape.num_heads + 2, shape.key_dim + 5, seed=batch.order).to(shape.dtype)
        # Unaligned, with other heads and columns around them.
        self.query = heads[:, 1 : 1 + shape.num_heads, 3 : 3 + shape.key_dim]

    def run(self, ops: NativeOps, params: AttentionParams, metadata: AttentionMetadata | None = None) -> Tensor:
        """The kernels' result."""
        plan = ops.plan_attention(metadata or self.metadata, self.kv_cache)
        return ops.decode_attention(self.query, self.kv_cache.layers[0], plan, params)

    def expected(self, params: AttentionParams) -> Tensor:
        """The reference's, in float32."""
        plan = REFERENCE.plan_attention(self.metadata, self.kv_cache)
        return REFERENCE.decode_attention(self.query.float(), self._cached(), plan, params)

    @property
    def largest_value(self) -> float:
        """The absolute of all that are cached."""
        return float(self._cached()[1].nan_to_num().abs().max())

    def _cached(self) -> tuple[Tensor, Tensor]:
        tensors = self.kv_cache.layers[0]
        keys, values = (tensor.float() for tensor in tensors[:2])
        if len(tensors) == 4:
            keys, values = keys * tensors[2].unsqueeze(-1), values * tensors[3].unsqueeze(-1)
        return keys, values


def assert_close(actual: Tensor, expected: Tensor, largest_value: float) -> None:
    """Assert that `actual` is `expected`, computed in float32, but for rounding."""
    is_rounded = actual.dtype == torch.bfloat16
    atol = 1e-5 * float(expected.abs().max()) + is_rounded * 2**-8 * largest_value
    torch.testing.assert_close(actual.float(), expected, atol=atol, rtol=2**-8 if is_rounded else 1e-5)


# One weight, whose rounding no other one makes up for.
LONE_WEIGHT = {"batch": Batch(16, [0], [1], order=2), "shape": Shape(1, 40, 16, 16, BFLOAT16, INT8)}


@given(batch=any_steps, shape=shapes(), window=windows, has_sinks=st.booleans())
@example(**LONE_WEIGHT, window=None, has_sinks=True)
@settings(max_examples=25)
def test_a_step_is_the_references(
    ops: NativeOps, batch: Batch, shape: Shape, window: int | None, has_sinks: bool
) -> None:
    step, params = CachedStep(batch, shape), shape.params(window, has_sinks=has_sinks)
    assert_close(step.run(ops, params), step.expected(params), step.largest_value)


# Enough work to be cut into pieces of the same rows, whose results are merged.
LONG = [
    Batch(16, [3000], [1], order=1),
    Batch(1, [1999], [9], order=2),
    Batch(64, [1500, 0, 900], [20, 300, 1], order=3),
    Batch(16, [1000] * 8, [1] * 8, order=4),
]


@every_pair(
    batch=LONG,
    kind=[(None, True, FLOAT32), (None, False, BFLOAT16), (1100, True, INT8)],
    num_threads=NUMS_THREADS,
    indirect=["num_threads"],
)
def test_long_contexts_are_the_references_on_any_number_of_threads(
    ops: NativeOps, num_threads: int, batch: Batch, kind: tuple[int | None, bool, torch.dtype]
) -> None:
    window, has_sinks, cache_dtype = kind
    shape = Shape(2, 3, 64, 64, FLOAT32 if cache_dtype == INT8 else cache_dtype, cache_dtype)
    step, params = CachedStep(batch, shape), shape.params(window, has_sinks=has_sinks)
    output = step.run(ops, params)
    assert_close(output, step.expected(params), step.largest_value)
    # Pieces are merged in their own order, not in that of the threads.
    assert torch.equal(step.run(ops, params), output)


def test_a_plan_serves_layers_with_different_windows(ops: NativeOps, num_threads: int) -> None:
    shape = Shape(2, 3, 64, 64, FLOAT32, FLOAT32)
    step = CachedStep(Batch(16, [1500, 40], [1, 70], order=1), shape)
    plan = ops.plan_attention(step.metadata, step.kv_cache)
    for window in (None, 30, 700, None):
        params = shape.params(window, has_sinks=False)
        output = ops.decode_attention(step.query, step.kv_cache.layers[0], plan, params)
        assert_close(output, step.expected(params), step.largest_value)


@every_pair(num_heads=[1, 16, 130], dtype=[FLOAT32, BFLOAT16], num_threads=NUMS_THREADS, indirect=["num_threads"])
def test_latent_attention_is_the_references(
    ops: NativeOps, num_threads: int, num_heads: int, dtype: torch.dtype
) -> None:
    batch = Batch(16, [600, 0, 30, 0], [1, 25, 5, 1], order=1)
    metadata, latents = batch.metadata(), batch.contexts(72, seed=1)
    cache = batch.make_cache((CacheTensor((72,), dtype),))
    tensor = cache.layers[0][0]
    batch.fill_cached(metadata, tensor, [latent.to(dtype) for latent in latents])
    ops.write_cache(batch.new_rows(latents).to(dtype), tensor, ops.plan_attention(metadata, cache))
    query = random(batch.num_tokens, num_heads + 1, 80).to(dtype)[:, 1:, 4:76]
    output = ops.mla_attention(query, tensor, ops.plan_attention(metadata, cache), scale=0.1, value_dim=52)
    plan, cached = REFERENCE.plan_attention(metadata, cache), tensor.float()
    assert output.is_contiguous()
    expected = REFERENCE.mla_attention(query.float(), cached, plan, scale=0.1, value_dim=52)
    assert_close(output, expected, float(cached.nan_to_num().abs().max()))


@pytest.mark.parametrize("context_len", [0, 1])
@pytest.mark.parametrize("num_new", [1, 20])
def test_a_padded_row_changes_nothing_and_is_finite(ops: NativeOps, context_len: int, num_new: int) -> None:
    shape = Shape(2, 3, 64, 64, FLOAT32, FLOAT32)
    step = CachedStep(Batch(16, [20, 0, 30], [1, 1, num_new], order=1), shape)
    params = shape.params(None, has_sinks=False)
    expected = step.expected(params)
    metadata = step.metadata
    metadata.context_lens[1] = context_len
    # The first entries of a padded row's table are 0, and block 0 may be any sequence's.
    metadata.block_tables[1] = 0
    for tensor in step.kv_cache.layers[0]:
        tensor[0] = 1.0
    output = step.run(ops, params)
    assert output.isfinite().all()
    rows = [row for row in range(len(output)) if row != 1]
    assert_close(output[rows], expected[rows], step.largest_value)


@every_pair(num_new=[1, 3, 40], name=["query", "keys", "values"], dtype=[FLOAT32, BFLOAT16])
def test_a_nan_stays_in_its_sequence(ops: NativeOps, dtype: torch.dtype, name: str, num_new: int) -> None:
    shape = Shape(2, 3, 20, 20, dtype, dtype)
    step = CachedStep(Batch(16, [0, 70, 33], [num_new] * 3, order=1), shape)
    params = shape.params(None, has_sinks=True)
    expected = step.expected(params)
    if name == "query":
        step.query[:num_new] = math.nan
    else:
        tensor = step.kv_cache.layers[0][0 if name == "keys" else 1]
        tensor[step.metadata.block_tables[0].long()] = math.nan
    output = step.run(ops, params)
    assert output[:num_new].isnan().all()
    assert_close(output[num_new:], expected[num_new:], step.largest_value)
