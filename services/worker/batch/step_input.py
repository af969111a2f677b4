"""What one step computes. Plain numpy on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.batch.decodes import DeviceDrafts
from services.worker.forward.staging import HostArrays
from services.worker.sampling.runs import NO_RUNS, Runs
from shared.request.sampling_params import Pooling
from shared.step.columns import Int32Column

_NO_SLOTS: Int32Column = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Prompt tokens of a chunk with log-probabilities requested."""

    slot: int
    first_token: int
    """First index among the step's tokens."""
    num_tokens: int
    """At least 1; completion tokens are not counted."""
    position: int
    """The first token's position in its sequence."""
    num_prompt_tokens: int
    num_top: int
    """Most likely tokens to report at each position."""


@dataclass(frozen=True, slots=True)
class PooledChunk:
    """Prompt tokens of a chunk whose hidden states make a vector."""

    slot: int
    first_token: int
    """First index among the step's tokens."""
    num_tokens: int
    """At least 1."""
    position: int
    """The first token's position in its sequence."""
    pooling: Pooling
    has_later_tokens: bool
    """Whether the prompt goes on in a later step."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one step computes, in host arrays that belong to it alone.

    Sequence i computes the tokens [cu_seqlens_q[i], cu_seqlens_q[i + 1]): a decode its last token and then its drafts,
    a prefill a chunk of its prompt. A row is a complete sequence, so tokens are sampled for it:

        sequence        0: decode, 2 drafts    1: decode    2: chunk, more to come    3: last chunk
        token_ids       t  d0 d1               t            p p p                     p p
        cu_seqlens_q    0                      3            4                         7               9
        row             0                      1            none                      2
        logit_tokens    0  1  2                3                                      8

    So row_indexes is [0, 1, 3] and num_decodes is 2. A sequence to decode that already had all its tokens is not
    computed and does not occur here, but has a row without tokens in the result.

    A dummy's tokens have no slot and no row, but an entry in the columns for attention.
    """

    num_decodes: int
    """Rows that decode, which come first; the others compute a part of their prompt."""
    slots: Int32Column  # [num_seqs]
    num_result_rows: int
    row_numbers: npt.NDArray[np.int64] | None  # [num_rows], the rows' places in the result; None means 0, 1, 2, …
    row_slots: Int32Column  # [num_rows]
    row_indexes: npt.NDArray[np.int64] | None  # [num_rows], the rows' sequences, ascending; None means all, in order
    row_positions: npt.NDArray[np.int64]  # [num_rows], the length so far: where the row's next token is drawn
    context_lens: Int32Column  # [num_seqs], including this step's tokens
    query_lens: Int32Column  # [num_seqs], this step's tokens
    cu_seqlens_q: Int32Column  # [num_seqs + 1]
    num_tokens: int
    """Tokens of all sequences, and of a dummy."""
    is_prefill: bool
    """Whether any token belongs to a prompt."""
    is_plain_decode: bool
    """Whether it computes the last token of each of its sequences, and nothing else."""
    num_blocks: int
    """Blocks that the longest context needs."""
    has_options: bool
    """Whether a row's logits are edited, or its token's log-probabilities are wanted."""
    table_width: int
    """Columns that the device's block tables need; never fewer than before."""
    arrays: HostArrays
    """What the device gets, by name: what the step changes by slot, see `DeviceBatch.apply` and `state_changes`, and
    what `row_arrays` names. Besides, unless the device makes them, as in plain decodes that nothing on the host reads:

        token_ids       [num_tokens] int64; 0 for what only the device has: drafts that it computes, and a decode's last
                        token unless drafts are made
        positions       [num_tokens] int64, each token's position in its sequence
        slot_mapping    [num_tokens] int64, block_id * block_size + offset; -1: its KV is not stored
        block_tables    [num_seqs, num_blocks] int32, 0 after a sequence's last block
        unknown_slots   [num_decodes] int64, the slots of the first tokens, if only the device has these
        chosen_drafts   see `Drafts.chosen`
    """
    runs: Runs = NO_RUNS
    """The places at which the rows' tokens are drawn; none if each is a row without options."""
    device_drafts: DeviceDrafts | None = None
    """What the device drafts for the step; None if the host knows its drafts."""
    draft_counts: Int32Column | None = None  # [num_rows], drafts of each row; None means that no row has any
    scored_chunks: tuple[ScoredChunk, ...] = ()
    pooled_chunks: tuple[PooledChunk, ...] = ()

    @classmethod
    def dummy(
        cls, num_tokens: int, num_blocks: int, *, is_prefill: bool, table_width: int, changes: HostArrays
    ) -> StepInput:
        """Tokens 0 of one text, which would have `num_blocks`, without KV."""
        length = np.full(1, num_tokens, np.int32)
        return cls(
            num_decodes=int(not is_prefill),
            slots=_NO_SLOTS,
            num_result_rows=0,
            row_numbers=None,
            row_slots=_NO_SLOTS,
            row_indexes=np.empty(0, np.int64),
            row_positions=np.empty(0, np.int64),
            context_lens=length,
            query_lens=length,
            cu_seqlens_q=np.array([0, num_tokens], np.int32),
            num_tokens=num_tokens,
            is_prefill=is_prefill,
            is_plain_decode=False,
            num_blocks=num_blocks,
            has_options=False,
            table_width=table_width,
            arrays=changes
            | {
                "token_ids": np.zeros(num_tokens, np.int64),
                "positions": np.arange(num_tokens, dtype=np.int64),
                "slot_mapping": np.full(num_tokens, -1, np.int64),
                # Attention reads whatever block 0 holds, and its result is discarded.
                "block_tables": np.zeros((1, num_blocks), np.int32),
            },
        )

    def row_sequences(self) -> npt.NDArray[np.int64]:
        """[num_rows], the rows' sequences, ascending."""
        return np.arange(len(self.slots)) if self.row_indexes is None else self.row_indexes

    def row_arrays(self) -> HostArrays:
        """Where the sequences and rows of a step are that is no plain decode, and where its tokens are drawn.

        `logit_tokens` are the tokens whose logits are sampled from, row after row; without it all are.
        """
        arrays: HostArrays = {
            "context_lens": self.context_lens,
            "cu_seqlens_q": self.cu_seqlens_q,
            "row_slots": self.row_slots.astype(np.int64),
            "row_positions": self.row_positions,
        }
        runs = self.runs
        if self.row_indexes is not None:
            ends = self.cu_seqlens_q[1:][self.row_indexes].astype(np.int64)
            if self.draft_counts is None:
                arrays["logit_tokens"] = ends - 1
            else:
                arrays["logit_tokens"] = (ends - self.draft_counts - 1)[runs.rows] + runs.offsets
        if self.draft_counts is not None:
            arrays["place_slots"] = arrays["row_slots"][runs.rows]
            arrays["place_positions"] = self.row_positions[runs.rows] + runs.offsets
            arrays |= {"run_firsts": runs.firsts, "run_wanted": runs.wanted}
        if self.device_drafts is not None:
            # Decodes are a step's first sequences, so their tokens are its first ones too.
            arrays["drafted_places"] = places = runs.drafted()
            arrays["drafted_tokens"] = places + 1
        return arrays
