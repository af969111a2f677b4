"""Random steps for tests of attention ops, and the reference definition they are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.forward.kv_cache import KvCache, KvCacheSpec, LayerCache
from services.worker.ops import AttentionParams
from tests.support.models.paged_model import attention_metadata


def random(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal values, determined by `seed`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Batch:
    """Sequences of random length in random blocks, some of their tokens cached."""

    block_size: int
    num_cached: list[int]
    num_new: list[int]
    order: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the step computes."""
        return sum(self.num_new)

    @property
    def context_lens(self) -> list[int]:
        """Context length of each sequence, new tokens included."""
        return [cached + new for cached, new in zip(self.num_cached, self.num_new, strict=True)]

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, a few more than are used."""
        return sum(-(-length // self.block_size) for length in self.context_lens) + 2

    def metadata(self, *, is_prefill: bool = True) -> AttentionMetadata:
        """The step's metadata. No table contains block 0, which pads tables and must never be read as context."""
        free = (1 + torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(self.order))).tolist()
        tables = [[free.pop() for _ in range(-(-length // self.block_size))] for length in self.context_lens]
        return attention_metadata(
            tables, self.num_new, self.context_lens, block_size=self.block_size, is_prefill=is_prefill
        )

    def make_cache(self, layer: LayerCache, *, fill: float = math.nan) -> KvCache:
        """A cache of one layer filled with `fill`, so that reads of unwritten slots show."""
        cache = KvCache(KvCacheSpec((layer,)), self.num_blocks, self.block_size)
        for tensor in cache.layers[0]:
            tensor.fill_(fill)
        return cache

    def contexts(self, *shape: int, seed: int = 0) -> list[Tensor]:
        """Random cache rows of each sequence's tokens, new ones included: [context_len, *shape] each."""
        return [random(length, *shape, seed=seed + 100 * index) for index, length in enumerate(self.context_lens)]

    def new_rows(self, contexts: Sequence[Tensor]) -> Tensor:
        """The rows of `contexts` that belong to the step's new tokens, [num_tokens, *shape]."""
        return torch.cat([context[-new:] for context, new in zip(contexts, self.num_new, strict=True)])

    def fill_cached(self, metadata: AttentionMetadata, cache: Tensor, contexts: Sequence[Tensor]) -> None:
        """Write the rows of already cached tokens into `cache`, in place."""
        for table, cached, context in zip(metadata.block_tables.long(), self.num_cached, contexts, strict=True):
            places = torch.arange(cached)
            cache[table[places // self.block_size], places % self.block_size] = context[:cached]

    def attend_each(self, attend: Callable[[int, int, int], Tensor]) -> Tensor:
        """Stack `attend(sequence, row, position)` over all tokens of the step."""
        outputs: list[Tensor] = []
        for seq, (cached, new) in enumerate(zip(self.num_cached, self.num_new, strict=True)):
            outputs += [attend(seq, len(outputs) + place, cached + place) for place in range(new)]
        return torch.stack(outputs)


def batches(*, max_new: int = 40, max_cached: int = 60, min_cached: int = 0) -> st.SearchStrategy[Batch]:
    """Steps of up to nine sequences."""
    return st.integers(1, 9).flatmap(
        lambda size: st.builds(
            Batch,
            block_size=st.sampled_from([1, 3, 16]),
            num_cached=st.lists(st.integers(min_cached, max_cached) | st.just(0), min_size=size, max_size=size),
            num_new=st.lists(st.integers(1, max_new), min_size=size, max_size=size),
            order=st.integers(0, 1000),
        )
    )


def attend(query: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
    """The reference, in float64: one query [H, D] over keys [n, K, D] and values [n, K, V] up to itself, as [H * V].

    Pass keys and values of the whole context: a sliding window is applied here.
    """
    group_size = query.shape[0] // keys.shape[1]
    first = 0 if params.window is None else max(0, len(keys) - params.window)
    heads = []
    for head, row in enumerate(query.double()):
        scores = keys[first:, head // group_size].double() @ row * params.scale
        if params.sinks is not None:
            scores = torch.cat((scores, params.sinks[head, None].double()))
        weights = scores.softmax(0)[: len(keys) - first]
        heads.append(weights @ values[first:, head // group_size].double())
    return torch.cat(heads)
