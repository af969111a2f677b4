"""What one step computes, as the worker's batch makes it for the model. Plain numpy on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.batch.replay import ReplayedChunk
from services.worker.sampling.sampler import SamplingRows
from services.worker.step import Int32Column

_NO_SLOTS: Int32Column = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """The prompt's tokens of a chunk whose log-probabilities are asked for."""

    slot: int
    first_token: int  # where they begin among the step's tokens
    num_tokens: int  # at least 1; completion behind them is not counted
    position: int  # of the first one
    num_prompt_tokens: int
    num_top: int  # likeliest tokens that each position comes with


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one step computes, in host arrays that belong to it alone.

    Sequence i computes the tokens [cu_seqlens_q[i], cu_seqlens_q[i + 1]): in a decode its last token and drafts behind
    it, else a part of its prompt. Tokens are sampled for those that are complete, the rows here. The result has a row
    more for each sequence that was to be decoded and has all its tokens: of those nothing is computed.

    A dummy's one token is of no sequence: it has no slot in the batch and no row, but a place like a sequence's in the
    columns that attention is planned from.
    """

    num_decodes: int  # the first so many sequences are decoded, the others compute a part of their prompt
    slots: Int32Column  # [num_seqs]
    num_result_rows: int
    row_numbers: npt.NDArray[np.int64] | None  # [num_rows], the rows' places in the result; None: they are all of it
    row_slots: Int32Column  # [num_rows]
    row_indexes: npt.NDArray[np.int64] | None  # [num_rows], which sequences they are; None: all, in order
    token_ids: npt.NDArray[np.int64]  # [num_tokens], possibly none
    positions: npt.NDArray[np.int64]  # [num_tokens], each token's place in its sequence
    slot_mapping: npt.NDArray[np.int64]  # [num_tokens], block_id * block_size + offset; -1: its KV goes nowhere
    block_tables: Int32Column  # [num_seqs, most blocks of one], 0 behind a sequence's last block
    context_lens: Int32Column  # [num_seqs], this step's tokens included
    query_lens: Int32Column  # [num_seqs], this step's tokens
    cu_seqlens_q: Int32Column  # [num_seqs + 1]
    sampling: SamplingRows  # of the rows
    scored_chunks: tuple[ScoredChunk, ...] = ()
    replayed_chunks: tuple[ReplayedChunk, ...] = ()

    @classmethod
    def dummy(cls, sampling: SamplingRows, *, is_prefill: bool) -> StepInput:
        """Token 0 at position 0, whose KV goes nowhere; `sampling` has no row."""
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        return cls(
            num_decodes=int(not is_prefill),
            slots=_NO_SLOTS,
            num_result_rows=0,
            row_numbers=None,
            row_slots=_NO_SLOTS,
            row_indexes=np.empty(0, np.int64),
            token_ids=zero.astype(np.int64),
            positions=zero.astype(np.int64),
            slot_mapping=np.full(1, -1, np.int64),
            # Attention reads what lies at the beginning of the pool, and nobody reads what comes of it.
            block_tables=zero[np.newaxis],
            context_lens=one,
            query_lens=one,
            cu_seqlens_q=np.array([0, 1], np.int32),
            sampling=sampling,
        )

    @property
    def is_prefill(self) -> bool:
        """Whether any tokens are a prompt's."""
        return self.num_decodes < len(self.query_lens)

    def row_sequences(self) -> npt.NDArray[np.int64]:
        """[num_rows], which sequences the rows are, ascending."""
        return np.arange(len(self.slots)) if self.row_indexes is None else self.row_indexes

    def logit_tokens(self) -> npt.NDArray[np.int64] | None:
        """The tokens whose logits `sampling` needs, row after row; None: those of all tokens."""
        if self.row_indexes is None:
            return None
        ends = self.cu_seqlens_q[1:][self.row_indexes].astype(np.int64)
        if self.sampling.draft_counts is None:
            return ends - 1
        counts = self.sampling.draft_counts + np.int64(1)
        return np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())
