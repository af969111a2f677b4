"""Forward passes besides a step's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, ForwardContext, forward_context
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.staging import to_device
from services.worker.ops import Ops
from services.worker.step import Int32Column
from shared.limits import MAX_DRAFT_TOKENS

IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Runs of consecutive tokens, one per sequence, that continue what the cache holds.

    The tables hold the blocks of every token up to a run's last.
    """

    first_positions: IntArray  # [num_runs]
    lengths: IntArray  # [num_runs], at least 1
    block_tables: Int32Column  # [num_runs, most blocks of one run]

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """[num_runs], each run's first token among all tokens."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    @property
    def lasts(self) -> npt.NDArray[np.int64]:
        """[num_runs], each run's last token among all tokens."""
        return np.cumsum(self.lengths, dtype=np.int64) - 1

    def spread(self, values: IntArray) -> npt.NDArray[np.int64]:
        """`values[i]`, `values[i]` + 1, … for the tokens of run i: [num_tokens]."""
        return np.arange(self.lengths.sum(), dtype=np.int64) + np.repeat(values - self.starts, self.lengths)

    def compute(self, ops: Ops, kv_cache: KvCache, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Call `forward` with all tokens' positions, [num_tokens] int64, in their forward context."""
        positions = self.spread(self.first_positions)
        attention = self._attention(positions, kv_cache)
        with forward_context(ForwardContext.for_step(ops, attention, kv_cache)):
            return forward(to_device(positions, kv_cache.device))

    def _attention(self, positions: npt.NDArray[np.int64], kv_cache: KvCache) -> AttentionMetadata:
        block_size, device = kv_cache.block_size, kv_cache.device
        context_lens = (self.first_positions + self.lengths).astype(np.int32)
        cu_seqlens_q = np.zeros(len(self.lengths) + 1, np.int32)
        np.cumsum(self.lengths, out=cu_seqlens_q[1:])
        run_of_token = np.repeat(np.arange(len(self.lengths)), self.lengths)
        block_ids = self.block_tables[run_of_token, positions // block_size].astype(np.int64)
        max_query_len = int(self.lengths.max())
        return AttentionMetadata(
            # A decode has one token and its drafts; a backend treats longer runs as parts of prompts.
            is_prefill=max_query_len > 1 + MAX_DRAFT_TOKENS,
            slot_mapping=to_device(block_ids * block_size + positions % block_size, device),
            block_tables=to_device(self.block_tables, device),
            context_lens=to_device(context_lens, device),
            cu_seqlens_q=to_device(cu_seqlens_q, device),
            query_lens=tuple(self.lengths.tolist()),
            context_lens_host=tuple(context_lens.tolist()),
            max_query_len=max_query_len,
            max_context_len=int(context_lens.max()),
        )
