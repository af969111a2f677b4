"""Random steps of latent attention and of the sparse indexer, and their definitions in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.forward.kv_cache import CacheTensor
from services.worker.ops import AttentionParams, Ops
from tests.support.kernels.attention_batches import Batch, attend, random

NUM_HEADS, LATENT_DIM, VALUE_DIM = 3, 12, 8
NUM_INDEX_HEADS, INDEX_DIM = 2, 4
SCALE = 0.4


@dataclass(frozen=True)
class Tokens:
    """Latents and index keys of every token of each sequence, and both kinds of queries of the new tokens."""

    latents: list[Tensor]
    index_keys: list[Tensor]
    query: Tensor
    index_query: Tensor
    index_weights: Tensor

    @classmethod
    def random(cls, batch: Batch, dtype: torch.dtype = torch.float32, *, num_heads: int = NUM_HEADS) -> Tokens:
        """Queries that are views of wider tensors. Scores are sums of whole numbers: exact, and often equal."""
        count = batch.num_tokens
        return cls(
            latents=[context.to(dtype) for context in batch.contexts(LATENT_DIM, seed=1)],
            index_keys=[context.round().to(dtype) for context in batch.contexts(INDEX_DIM, seed=2)],
            query=random(count, num_heads, LATENT_DIM + 2, seed=batch.order).to(dtype)[..., :LATENT_DIM],
            index_query=random(count, NUM_INDEX_HEADS + 1, INDEX_DIM, seed=3).round().to(dtype)[:, :NUM_INDEX_HEADS],
            index_weights=random(count, NUM_INDEX_HEADS, seed=4).round(),
        )

    def part(self, seq: int, rows: slice, context_len: int) -> Tokens:
        """One sequence's tokens, with the queries of the step's tokens `rows`."""
        return Tokens(
            [self.latents[seq][:context_len]],
            [self.index_keys[seq][:context_len]],
            self.query[rows],
            self.index_query[rows],
            self.index_weights[rows],
        )


class LatentStep:
    """A batch and the cache that it runs on."""

    def __init__(self, batch: Batch, *, is_prefill: bool, tokens: Tokens | None = None) -> None:
        """Fill the cache with the tokens before the step; `tokens` are random by default."""
        self.batch = batch
        self.tokens = Tokens.random(batch) if tokens is None else tokens
        self.metadata = batch.metadata(is_prefill=is_prefill)
        dtype = self.tokens.query.dtype
        cache = batch.make_cache((CacheTensor((LATENT_DIM,), dtype), CacheTensor((INDEX_DIM,), dtype)))
        self.cache = cache
        batch.fill_cached(self.metadata, cache.layers[0][0], self.tokens.latents)
        batch.fill_cached(self.metadata, cache.layers[0][1], self.tokens.index_keys)

    def select(self, ops: Ops, num_selected: int) -> Tensor | None:
        """Write the index keys and select."""
        plan = ops.plan_attention(self.metadata, self.cache)
        tokens, index_keys = self.tokens, self.cache.layers[0][1]
        ops.write_cache(self.batch.new_rows(tokens.index_keys), index_keys, plan)
        return ops.select_context(tokens.index_query, tokens.index_weights, index_keys, plan, num_selected=num_selected)

    def attend(self, ops: Ops, *, num_selected: int | None = None) -> Tensor:
        """One layer's writes and attention, over all tokens or over those that the indexer selects."""
        plan = ops.plan_attention(self.metadata, self.cache)
        latents = self.cache.layers[0][0]
        ops.write_cache(self.batch.new_rows(self.tokens.latents), latents, plan)
        selected = None if num_selected is None else self.select(ops, num_selected)
        query = self.tokens.query
        return ops.mla_attention(query, latents, plan, scale=SCALE, value_dim=VALUE_DIM, selected=selected)

    def expected(self, *, num_selected: int | None = None) -> Tensor:
        """The result by definition."""
        if num_selected is None:
            return self.expected_at(lambda _seq, _row, position: list(range(position + 1)))
        return self.expected_at(lambda seq, row, position: sorted(self.best(seq, row, position)[:num_selected]))

    def expected_at(self, seen: Callable[[int, int, int], list[int]]) -> Tensor:
        """Attention of each token to the positions `seen(sequence, row, position)`."""

        def attend_one(seq: int, row: int, position: int) -> Tensor:
            keys = self.tokens.latents[seq][seen(seq, row, position), None]
            attended = attend(self.tokens.query[row], keys, keys[..., :VALUE_DIM], AttentionParams(SCALE))
            return attended.view(-1, VALUE_DIM)

        return self.batch.attend_each(attend_one)

    def best(self, seq: int, row: int, position: int) -> list[int]:
        """Positions up to a token's own, best first."""
        products = self.tokens.index_keys[seq][: position + 1].double() @ self.tokens.index_query[row].double().T
        scores = (torch.relu(products) @ self.tokens.index_weights[row].double()).tolist()
        return sorted(range(position + 1), key=lambda place: (-scores[place], place))


def padded(metadata: AttentionMetadata, row: int) -> AttentionMetadata:
    """The metadata with a row of one token turned into padding."""
    lengths = [0 if seq == row else length for seq, length in enumerate(metadata.context_lens_host)]
    slots, tables = metadata.slot_mapping.clone(), metadata.block_tables.clone()
    slots[row], tables[row] = -1, 0
    return replace(
        metadata,
        slot_mapping=slots,
        block_tables=tables,
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        context_lens_host=tuple(lengths),
    )


def pad_as_in_graph(metadata: AttentionMetadata, row: int, context_len: int) -> AttentionMetadata:
    """A row of one token turned into padding of which the host's lengths say nothing."""
    slots, tables, lengths = (
        each.clone() for each in (metadata.slot_mapping, metadata.block_tables, metadata.context_lens)
    )
    slots[row], tables[row], lengths[row] = -1, 0, context_len
    return replace(metadata, slot_mapping=slots, block_tables=tables, context_lens=lengths)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare with the tolerance of float32."""
    torch.testing.assert_close(actual.double(), expected.double(), atol=1e-5, rtol=1e-5)
