"""One step and its result, as plain data: what a scheduler plans of sequences, and the columns that a worker reads.

Never changed once made, yet not frozen: creating a frozen object takes three times as long, and every step creates
several. What a sequence brings is kept in bytes, as it travels, so that neither side converts what it only passes on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.ids import Slot
from shared.request.limits import TOKEN_DTYPE
from shared.request.sampling_params import SamplingOptions, SamplingParams
from shared.step.columns import Float32Column, Int32Column, Int64Column
from shared.step.logprobs import Logprobs

NO_INTS: Int32Column = np.empty(0, np.int32)
NO_PAIRS: Int32Column = np.empty((0, 2), np.int32)
SAMPLED_DTYPE = np.dtype(
    [("seed", np.uint64), ("choice", np.int64), ("top_k", np.int64), ("temperature", np.float32), ("top_p", np.float32)]
)
"""The parameters that every sequence is sampled with."""


class StepKind(enum.Enum):
    """What a step computes: prompt tokens, one token per row, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(slots=True)
class PrefillChunk:
    """A sequence's next tokens, whose KV the step computes: prompt tokens, then completion tokens."""

    slot: Slot
    token_bytes: bytes
    num_later_tokens: int
    """Tokens left for later steps; at 0 a token is sampled."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return len(self.token_bytes) // TOKEN_DTYPE.itemsize


@dataclass(slots=True)
class EnteringSequence:
    """A sequence that enters the batch."""

    chunk: PrefillChunk
    """Its first tokens without cached KV."""
    num_cached_tokens: int
    num_prompt_tokens: int
    block_bytes: bytes
    """The block table."""
    params: SamplingParams
    """The worker gets them without stops and `ignore_eos`: the scheduler ends sequences."""
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Not drawn before `options.min_tokens`; empty without it."""
    cached_token_bytes: bytes = b""
    """The tokens before the chunk, if options or drafts need them."""

    @property
    def max_num_tokens(self) -> int:
        """Limit for prompt and completion together."""
        return self.num_prompt_tokens + self.params.max_tokens


@dataclass(slots=True)
class Chunks:
    """The tokens of prompts that a step computes, in columns: [num_chunks], unless said otherwise.

    First those of sequences that entered before, then those of sequences that enter, in their order.
    """

    slots: Int64Column
    num_tokens: Int64Column
    token_ids: Int32Column  # [sum of num_tokens], chunk after chunk
    num_later_tokens: Int64Column


@dataclass(slots=True)
class Enters:
    """Sequences that enter, in columns: [num_enters], unless said otherwise. See `EnteringSequence`."""

    slots: Int64Column
    num_cached_tokens: Int64Column
    num_prompt_tokens: Int64Column
    max_num_tokens: Int64Column
    num_blocks: Int64Column
    block_ids: Int32Column  # [sum of num_blocks], table after table
    num_told_tokens: Int64Column
    """How many cached tokens of each are told."""
    told_token_ids: Int32Column  # [sum of num_told_tokens]
    sampled: npt.NDArray[np.void]
    """How each is sampled, as `SAMPLED_DTYPE`."""
    options: dict[int, SamplingOptions]
    """By number, for those that have some."""
    stop_token_ids: dict[int, Int32Column]
    """Likewise, for those that have any."""

    def told_tokens(self) -> list[Int32Column]:
        """The cached tokens of each that are told, as views."""
        return np.split(self.told_token_ids, np.cumsum(self.num_told_tokens)[:-1])


_NO_NUMBERS: Int64Column = np.empty(0, np.int64)
NO_CHUNKS = Chunks(_NO_NUMBERS, _NO_NUMBERS, NO_INTS, _NO_NUMBERS)
NO_ENTERS = Enters(
    slots=_NO_NUMBERS,
    num_cached_tokens=_NO_NUMBERS,
    num_prompt_tokens=_NO_NUMBERS,
    max_num_tokens=_NO_NUMBERS,
    num_blocks=_NO_NUMBERS,
    block_ids=NO_INTS,
    num_told_tokens=_NO_NUMBERS,
    told_token_ids=NO_INTS,
    sampled=np.empty(0, SAMPLED_DTYPE),
    options={},
    stop_token_ids={},
)


@dataclass(slots=True)
class Step:
    """Changes to the worker's batch, in the order of the fields, and what is then computed.

    A scheduler's own plan has other columns: lists, and arrays that index its own.
    """

    epoch: int
    step_id: int
    kind: StepKind
    leave_slots: Int32Column
    enters: Enters
    append_slots: Int32Column
    """Parallel to `append_block_ids`; a slot that gets several blocks occurs several times."""
    append_block_ids: Int32Column
    decode_slots: Int32Column | None
    """None means all complete sequences already in the batch, in the order they entered."""
    chunks: Chunks
    """Next tokens of incomplete sequences that entered before, and the first ones of those that enter."""
    is_dummy: bool = False
    """Compute only tokens without KV: for the collectives of other ranks, or to learn whether this rank can compute."""
    num_tokens_across_dp: tuple[int, ...] = ()
    """This step's tokens on each coupled DP rank; empty if ranks are not coupled."""
    graph_batch_size: int = 0
    """Coupled ranks only: the batch size of the graph that every rank runs; 0 means that all run eagerly."""
    state_saves: Int32Column = field(default_factory=lambda: NO_PAIRS)
    """[num_saves, 2], a slot and the checkpoint that gets its recurrent state after this step."""
    state_restores: Int32Column = field(default_factory=lambda: NO_PAIRS)
    """[num_restores, 2], the slot of an entering sequence and the checkpoint with its recurrent state."""
    num_dummy_tokens: int = 1
    """The tokens of a dummy, at least 1."""


@dataclass(slots=True)
class StepResult:
    """Each row's tokens, in row order."""

    epoch: int
    step_id: int
    token_ids: Int32Column
    not_finite_rows: Int32Column
    """Rows (not slots) with logits that were not finite; their tokens are meaningless."""
    device_time_us: int = 0
    counts: Int32Column | None = None  # [num_rows], tokens of each row; None means one each
    num_draft_tokens: int = 0
    logprobs: Logprobs | None = None
    """Values by index into `token_ids`."""
    prompt_logprobs: tuple[tuple[int, Logprobs], ...] = ()
    """Values by slot; `indexes` are positions in the prompt."""
    failed_grammar_rows: Int32Column = field(default_factory=lambda: NO_INTS)
    """Rows with a grammar that cannot be followed further; only their last token is meaningless."""
    not_finite_saves: Int32Column = field(default_factory=lambda: NO_INTS)
    """Indexes into `Step.state_saves` whose states were not finite."""
    vectors: tuple[tuple[int, Float32Column], ...] = ()
    """Vectors [hidden] of prompts that end here, by slot."""

    @property
    def num_accepted_tokens(self) -> int:
        """The drafted tokens: all but the last of each row."""
        num_rows = len(self.token_ids) if self.counts is None else int(np.count_nonzero(self.counts))
        return len(self.token_ids) - num_rows
