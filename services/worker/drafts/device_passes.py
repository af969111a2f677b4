"""Forward passes besides a step's own, over runs of tokens at positions that only the device may know.

Those are the positions after a step of which the host has no results yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.worker.drafts.token_runs import IntArray, TokenRuns
from services.worker.forward.forward_context import AttentionMetadata, ForwardContext, forward_context
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.staging import HostArrays, is_on_host, upload_arrays
from services.worker.ops import Ops, RunRows
from shared.request.limits import MAX_DRAFT_TOKENS
from shared.step.columns import Int32Column


@dataclass(frozen=True, slots=True)
class Sequences:
    """What the host knows of the sequences of some passes, at least one."""

    block_tables: Int32Column  # [num_seqs, most blocks of one sequence]
    ends: IntArray
    """[num_seqs], the room of each, at least 1: a token at a later position is computed, but not stored."""
    lengths: IntArray
    """[num_seqs], the tokens of each one's run, at least 1."""

    @classmethod
    def of_runs(cls, runs: TokenRuns, block_tables: Int32Column) -> Sequences:
        """Sequences that have the blocks of all tokens of `runs`, and end with them."""
        return cls(block_tables, runs.context_lens, runs.lengths)

    def arrays(self) -> HostArrays:
        """What `DevicePasses` are uploaded from."""
        num_seqs = len(self.ends)
        starts = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(self.lengths, out=starts[1:])
        return {
            "block_tables": self.block_tables,
            "ends": self.ends.astype(np.int64),
            "run_starts": starts,
            "token_starts": np.arange(num_seqs + 1, dtype=np.int32),
            "stored_from": np.zeros(num_seqs, np.int64),
        }


class DevicePasses:
    """Forward passes over the same sequences, one after another. The host waits for none.

    What is not stored, for want of room, reaches only later tokens of its own sequence in these passes.
    """

    def __init__(self, ops: Ops, kv_cache: KvCache, sequences: Sequences, others: HostArrays) -> None:
        """Upload what the host knows, in one transfer; `others` are named otherwise than `Sequences.arrays`."""
        self._ops = ops
        self._kv_cache = kv_cache
        self._sequences = sequences
        self.arrays = upload_arrays({**others, **sequences.arrays()}, kv_cache.device)
        """What was uploaded, by name."""

    def place_runs(self, firsts: Tensor, stored_from: Tensor | None = None) -> PlacedPasses:
        """Find the places of a pass over each sequence's run.

        Args:
            firsts: [num_seqs] int64, each run's first position.
            stored_from: [num_seqs] int64, the position up to which the cache has what is computed; None means 0.
        """
        return self._place(firsts, "run_starts", self._sequences.lengths.tolist(), 1, stored_from)

    def place_tokens(self, firsts: Tensor, num_passes: int) -> PlacedPasses:
        """Find the places of passes of one token each, at consecutive positions from `firsts` [num_seqs] int64 on."""
        return self._place(firsts, "token_starts", [1] * len(firsts), num_passes)

    def _place(
        self, firsts: Tensor, starts: str, lengths: list[int], num_passes: int, stored_from: Tensor | None = None
    ) -> PlacedPasses:
        arrays = self.arrays
        stored_from = arrays["stored_from"] if stored_from is None else stored_from
        runs = RunRows(firsts, arrays[starts], stored_from, arrays["ends"], arrays["block_tables"])
        places = self._ops.place_runs(runs, sum(lengths), block_size=self._kv_cache.block_size, num_passes=num_passes)
        lens = places.context_lens.tolist() if is_on_host(firsts) else [self._sequences.ends.tolist()] * num_passes
        return PlacedPasses(
            self._ops,
            self._kv_cache,
            runs,
            lengths,
            positions=places.positions.unbind(),
            slot_mappings=places.slot_mapping.unbind(),
            context_lens=places.context_lens.unbind(),
            host_lens=lens,
        )


@dataclass(frozen=True, slots=True)
class PlacedPasses:
    """Passes over the same runs, one after another, whose places the device has; see `RunPlaces`."""

    ops: Ops
    kv_cache: KvCache
    runs: RunRows
    lengths: list[int]
    positions: Sequence[Tensor]
    slot_mappings: Sequence[Tensor]
    context_lens: Sequence[Tensor]
    host_lens: list[list[int]]
    """The context lengths of each pass on the host, or what they are at most."""

    def compute(self, forward: Callable[[Tensor], Tensor], number: int = 0, num_tokens: int | None = None) -> Tensor:
        """Call `forward` with the positions of a pass's tokens [num_tokens] int64, in its forward context.

        Args:
            forward: Computes a tensor from the positions.
            number: Counts the passes.
            num_tokens: Those of the first sequences, where each has one; None means all.
        """
        runs, lengths, lens = self.runs, self.lengths, self.host_lens[number]
        tables, starts, context_lens = runs.block_tables, runs.starts, self.context_lens[number]
        positions, slot_mapping = self.positions[number], self.slot_mappings[number]
        if num_tokens is not None and num_tokens < len(positions):
            lengths, lens, starts = lengths[:num_tokens], lens[:num_tokens], starts[: num_tokens + 1]
            tables, context_lens, positions, slot_mapping = (
                each[:num_tokens] for each in (tables, context_lens, positions, slot_mapping)
            )
        longest = max(lengths)
        attention = AttentionMetadata(
            # A decode has one token and its drafts; a backend treats longer runs as parts of prompts.
            is_prefill=longest > 1 + MAX_DRAFT_TOKENS,
            slot_mapping=slot_mapping,
            block_tables=tables,
            context_lens=context_lens,
            cu_seqlens_q=starts,
            query_lens=tuple(lengths),
            context_lens_host=tuple(lens),
            max_query_len=longest,
            max_context_len=max(lens),
        )
        with forward_context(ForwardContext(self.ops.plan_attention(attention, self.kv_cache), self.kv_cache)):
            return forward(positions)
