"""A step's attention for tests of kernels that read a paged cache, and what the reference backend computes for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.forward.kv_cache import CacheTensor, LayerCache
from services.worker.ops import AttentionParams, load_ops
from services.worker.ops.triton.attention.tile import PagedSequences
from tests.support.kernels.attention_batches import Batch, random

FP8 = torch.float8_e4m3fn
# No powers of two: they would be lost in the exponents of the codes.
FP8_SCALES = (torch.tensor([0.03]), torch.tensor([1.7]))

Launch = Callable[[Tensor, tuple[Tensor, ...], Tensor, PagedSequences, AttentionParams], None]


class PagedStep:
    """Random queries over contexts whose keys and values are all in the cache. The rest of the cache is NaN.

    The query lies where the fused projection leaves it: with other heads after each token's. A cache in FP8 has codes
    of what it would have in float32, and scales.
    """

    def __init__(
        self,
        batch: Batch,
        *,
        num_heads: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        ops = load_ops("reference")
        layer: LayerCache = tuple(CacheTensor((num_kv_heads, dim), torch.float32) for dim in (key_dim, value_dim))
        kv_cache = batch.make_cache(layer)
        self.metadata = batch.metadata()
        self.plan = ops.plan_attention(self.metadata, kv_cache)
        self.cache = kv_cache.layers[0]
        for seed, tensor in enumerate(self.cache):
            contexts = batch.contexts(*tensor.shape[2:], seed=seed + 1)
            batch.fill_cached(self.metadata, tensor, contexts)
            ops.write_cache(batch.new_rows(contexts), tensor, self.plan)
        if kv_dtype == FP8:
            codes = ((tensor / scale).to(FP8) for tensor, scale in zip(self.cache, FP8_SCALES, strict=True))
            self.cache = (*codes, *FP8_SCALES)
        self.query = random(batch.num_tokens, num_heads + 2 * num_kv_heads, key_dim)[:, :num_heads]

    def sequences(self) -> PagedSequences:
        """All sequences, with upper bounds that are larger than the lengths."""
        metadata = self.metadata
        return PagedSequences(
            metadata.block_tables,
            metadata.context_lens,
            metadata.cu_seqlens_q,
            num_tokens=len(self.query) + 5,
            max_query_len=metadata.max_query_len + 2,
            max_context_len=2 * metadata.max_context_len,
        )

    def run(self, launch: Launch, params: AttentionParams) -> Tensor:
        """What `launch` writes, [T, H * V]; NaN where it writes nothing."""
        output = torch.full((len(self.query), self.query.shape[1] * self.cache[1].shape[-1]), math.nan)
        launch(self.query, self.cache, output, self.sequences(), params)
        return output

    def expected(self, params: AttentionParams) -> Tensor:
        """The same from the reference backend."""
        return load_ops("reference").decode_attention(self.query, self.cache, self.plan, params)


def check_attention(step: PagedStep, launch: Launch, params: AttentionParams) -> None:
    """Assert that `launch` computes what the reference backend does."""
    torch.testing.assert_close(step.run(launch, params), step.expected(params), atol=2e-5, rtol=2e-5)


def make_step(
    batch: Batch,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    *,
    kv_dtype: torch.dtype = torch.float32,
) -> PagedStep:
    """A step whose keys and values are `head_dim` wide."""
    return PagedStep(
        batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        kv_dtype=kv_dtype,
    )
