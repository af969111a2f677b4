"""Forward passes besides a step's own, at positions that the host knows; `device_passes` has the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata, ForwardContext, forward_context
from services.worker.forward.kv_cache import KvCache
from services.worker.forward.staging import HostArrays, upload_arrays
from services.worker.ops import Ops
from shared.request.limits import MAX_DRAFT_TOKENS
from shared.step.columns import Int32Column

IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Runs of consecutive tokens, one per sequence, that continue what the cache holds."""

    first_positions: IntArray  # [num_runs]
    lengths: IntArray  # [num_runs], at least 1

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """[num_runs], each run's first token among all tokens."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    @property
    def lasts(self) -> npt.NDArray[np.int64]:
        """[num_runs], each run's last token among all tokens."""
        return np.cumsum(self.lengths, dtype=np.int64) - 1

    @property
    def context_lens(self) -> Int32Column:
        """[num_runs], KV tokens of each sequence, including its run."""
        context_lens: Int32Column = (self.first_positions + self.lengths).astype(np.int32)
        return context_lens

    def spread(self, values: IntArray) -> npt.NDArray[np.int64]:
        """`values[i]`, `values[i]` + 1, … for the tokens of run i: [num_tokens]."""
        return np.arange(self.lengths.sum(), dtype=np.int64) + np.repeat(values - self.starts, self.lengths)

    def arrays(self, block_tables: Int32Column, block_size: int) -> HostArrays:
        """What a forward pass needs on the device besides token ids and `block_tables`; see `AttentionMetadata`."""
        positions = self.spread(self.first_positions)
        cu_seqlens_q = np.zeros(len(self.lengths) + 1, np.int32)
        np.cumsum(self.lengths, out=cu_seqlens_q[1:])
        run_of_token = np.repeat(np.arange(len(self.lengths)), self.lengths)
        block_ids = block_tables[run_of_token, positions // block_size].astype(np.int64)
        return {
            "positions": positions,
            "slot_mapping": block_ids * block_size + positions % block_size,
            "context_lens": self.context_lens,
            "cu_seqlens_q": cu_seqlens_q,
        }


class ForwardPass:
    """A forward pass whose inputs the host knows, but for the token ids."""

    def __init__(
        self, ops: Ops, kv_cache: KvCache, runs: TokenRuns, *, block_tables: Int32Column, others: HostArrays
    ) -> None:
        """Upload what the pass needs, in one transfer that the host does not wait for.

        Args:
            runs: At least one.
            block_tables: [num_seqs, most blocks of one sequence], with the blocks of all tokens.
            others: More int32, int64 or float32 arrays to upload, named otherwise than those here.
        """
        self._ops = ops
        self._kv_cache = kv_cache
        self._runs = runs
        arrays = {**others, "block_tables": block_tables, **runs.arrays(block_tables, kv_cache.block_size)}
        self.arrays = upload_arrays(arrays, kv_cache.device)
        """What was uploaded, by name: `others` and what the pass needs."""

    def compute(self, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Call `forward` with the positions [num_tokens] int64, in the pass's forward context."""
        arrays, runs = self.arrays, self._runs
        attention = run_metadata(
            arrays["slot_mapping"],
            arrays["block_tables"],
            arrays["context_lens"],
            arrays["cu_seqlens_q"],
            query_lens=tuple(runs.lengths.tolist()),
            context_lens_host=tuple(runs.context_lens.tolist()),
        )
        with forward_context(ForwardContext.for_step(self._ops, attention, self._kv_cache)):
            return forward(arrays["positions"])


def run_metadata(
    slot_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    query_lens: tuple[int, ...],
    context_lens_host: tuple[int, ...],
) -> AttentionMetadata:
    """The metadata of runs; see `AttentionMetadata`."""
    max_query_len = max(query_lens)
    return AttentionMetadata(
        # A decode has one token and its drafts; a backend treats longer runs as parts of prompts.
        is_prefill=max_query_len > 1 + MAX_DRAFT_TOKENS,
        slot_mapping=slot_mapping,
        block_tables=block_tables,
        context_lens=context_lens,
        cu_seqlens_q=cu_seqlens_q,
        query_lens=query_lens,
        context_lens_host=context_lens_host,
        max_query_len=max_query_len,
        max_context_len=max(context_lens_host),
    )
