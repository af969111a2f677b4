"""Runs a model on sequences in scattered KV blocks: a miniature model runner, for tests of models and kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, ForwardContext, forward_context
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.state_cache import StateCache
from services.worker.models.registry import CausalLM
from services.worker.ops import Ops

_NUM_STATE_SLOTS = 64


@dataclass
class PagedSequence:
    """A sequence's tokens, its KV blocks, and the slot of its recurrent state."""

    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    state_slot: int | None = None
    """None before its first step."""


def attention_metadata(
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    block_size: int,
    is_prefill: bool,
    state_slots: Tensor | None = None,
) -> AttentionMetadata:
    """The metadata of a step that computes the last `query_lens[i]` of `context_lens[i]` tokens of each sequence."""
    slots: list[int] = []
    for table, query_len, context_len in zip(block_tables, query_lens, context_lens, strict=True):
        slots += [
            table[place // block_size] * block_size + place % block_size
            for place in range(context_len - query_len, context_len)
        ]
    width = max(map(len, block_tables))
    return AttentionMetadata(
        is_prefill=is_prefill,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_tables=torch.tensor([[*table, *[0] * (width - len(table))] for table in block_tables], dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        query_lens=tuple(query_lens),
        context_lens_host=tuple(context_lens),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        state_slots=state_slots,
    )


class PagedModel:
    """A model, a KV cache and its free blocks in shuffled order, and the states of recurrent layers."""

    def __init__(self, model: CausalLM, ops: Ops, *, num_blocks: int = 512, block_size: int = 16) -> None:
        self.model = model
        self.ops = ops
        self.kv_cache = KvCache(model.kv_cache_spec, num_blocks, block_size)
        self.states = StateCache(model.state_spec, _NUM_STATE_SLOTS) if model.state_spec.layers else None
        self._free_slots = list(range(_NUM_STATE_SLOTS))
        random.Random(5).shuffle(self._free_slots)
        self._free_blocks = list(range(num_blocks))
        random.Random(7).shuffle(self._free_blocks)

    def add(self, token_ids: Sequence[int], *, prefix_of: PagedSequence | None = None) -> PagedSequence:
        """Add a sequence; with `prefix_of` it shares the blocks counted by `num_shared`."""
        sequence = PagedSequence(list(token_ids))
        if prefix_of is not None:
            sequence.block_table = prefix_of.block_table[: self.num_shared(sequence, prefix_of)]
        self._fill_table(sequence)
        return sequence

    def drop(self, sequence: PagedSequence) -> None:
        """Take its blocks and its state from a sequence that shares none; the next one that needs some gets them."""
        self._free_blocks += sequence.block_table
        sequence.block_table = []
        if sequence.state_slot is not None:
            self._free_slots.append(sequence.state_slot)
            sequence.state_slot = None

    def num_shared(self, sequence: PagedSequence, other: PagedSequence) -> int:
        """The number of equal full blocks at the start of both, without the last token of `sequence`.

        0 for a model with recurrent layers: the state after these blocks is not kept.
        """
        if self.states is not None:
            return 0
        size = self.kv_cache.block_size
        count = 0
        while (count + 1) * size < len(sequence.token_ids) and (
            sequence.token_ids[count * size : (count + 1) * size] == other.token_ids[count * size : (count + 1) * size]
        ):
            count += 1
        return count

    def prefill(self, sequences: Sequence[PagedSequence], num_cached: Sequence[int] | None = None) -> Tensor:
        """Compute all tokens after the cached ones; returns each sequence's last logits, [num_seqs, vocabulary]."""
        cached = num_cached or [0] * len(sequences)
        query_lens = [len(seq.token_ids) - count for seq, count in zip(sequences, cached, strict=True)]
        return self._step(sequences, query_lens, is_prefill=True)

    def prefill_all(self, sequence: PagedSequence) -> Tensor:
        """Compute one sequence; returns the logits of every token, [num_tokens, vocabulary]."""
        return self._step([sequence], [len(sequence.token_ids)], is_prefill=True, all_logits=True)

    def decode_runs(self, sequences: Sequence[PagedSequence], query_lens: Sequence[int]) -> Tensor:
        """Compute the last `query_lens[i]` tokens of each sequence, as decodes with drafts; returns their logits."""
        for sequence in sequences:
            self._fill_table(sequence)
        return self._step(sequences, list(query_lens), is_prefill=False, all_logits=True)

    def extend(self, sequences: Sequence[PagedSequence], query_lens: Sequence[int], *, is_prefill: bool) -> Tensor:
        """Compute the last `query_lens[i]` tokens of each sequence; returns the last logits, [num_seqs, vocabulary].

        Args:
            sequences: All tokens before the computed ones must be in the cache.
            query_lens: At least 1 each; all 1 if not `is_prefill`.
            is_prefill: Whether the step has prompt chunks, alone or with decodes.
        """
        for sequence in sequences:
            self._fill_table(sequence)
        return self._step(sequences, list(query_lens), is_prefill=is_prefill)

    def state_slots(self, sequences: Sequence[PagedSequence]) -> Tensor | None:
        """The sequences' slots; those of new ones are cleared."""
        if self.states is None:
            return None
        for sequence in sequences:
            if sequence.state_slot is None:
                sequence.state_slot = self._free_slots.pop()
                self.states.clear(torch.tensor([sequence.state_slot]))
        return torch.tensor([sequence.state_slot for sequence in sequences])

    def _fill_table(self, sequence: PagedSequence) -> None:
        while len(sequence.block_table) * self.kv_cache.block_size < len(sequence.token_ids):
            sequence.block_table.append(self._free_blocks.pop())

    def _step(
        self, sequences: Sequence[PagedSequence], query_lens: list[int], *, is_prefill: bool, all_logits: bool = False
    ) -> Tensor:
        metadata = attention_metadata(
            [seq.block_table for seq in sequences],
            query_lens,
            [len(seq.token_ids) for seq in sequences],
            block_size=self.kv_cache.block_size,
            is_prefill=is_prefill,
            state_slots=self.state_slots(sequences),
        )
        new_tokens = [seq.token_ids[-count:] for seq, count in zip(sequences, query_lens, strict=True)]
        places = [
            range(len(seq.token_ids) - n, len(seq.token_ids)) for seq, n in zip(sequences, query_lens, strict=True)
        ]
        token_ids = torch.tensor([token for tokens in new_tokens for token in tokens], dtype=torch.int64)
        positions = torch.tensor([place for span in places for place in span], dtype=torch.int64)
        plan = self.ops.plan_attention(metadata, self.kv_cache)
        with forward_context(ForwardContext(plan, self.kv_cache, states=self.states)):
            hidden = self.model.forward(token_ids, positions)
        rows = slice(None) if all_logits else metadata.cu_seqlens_q[1:].long() - 1
        return self.model.compute_logits(hidden[rows])
