"""One step as plain data, frozen because it crosses threads."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.limits import SamplingOptions

Int32Column = npt.NDArray[np.int32]

_NO_TOKENS: Int32Column = np.empty(0, np.int32)


class StepKind(enum.Enum):
    """What a step computes."""

    PREFILL = enum.auto()
    DECODE = enum.auto()
    MIXED = enum.auto()


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A sequence's next tokens, whose KV the step computes. Unchecked."""

    slot: int
    token_ids: Int32Column
    """Prompt tokens, then completion tokens."""
    num_later_tokens: int
    """Tokens left for later steps; at 0 a token is sampled."""


@dataclass(frozen=True, slots=True)
class EnteringSequence:
    """A sequence that enters the batch. Unchecked."""

    chunk: PrefillChunk
    """Its first tokens without cached KV."""
    num_cached_tokens: int
    num_prompt_tokens: int
    block_ids: Int32Column
    temperature: float
    top_k: int
    top_p: float
    seed: int
    max_num_tokens: int
    """Limit for prompt and completion together."""
    choice: int = 0
    options: SamplingOptions | None = None
    stop_token_ids: Int32Column = field(default_factory=lambda: _NO_TOKENS)
    """Not drawn before `options.min_tokens`."""
    cached_token_ids: Int32Column = field(default_factory=lambda: _NO_TOKENS)
    """The tokens before the chunk, if options or drafts need them."""


@dataclass(frozen=True, slots=True)
class Step:
    """Changes to the batch, in the order of the fields, and what is then computed."""

    epoch: int
    step_id: int
    kind: StepKind
    leave_slots: Int32Column
    enters: tuple[EnteringSequence, ...]
    append_slots: Int32Column
    """Parallel to `append_block_ids`; a slot that gets several blocks occurs several times."""
    append_block_ids: Int32Column
    decode_slots: Int32Column | None
    """None means all complete sequences already in the batch, in the order they entered."""
    chunks: tuple[PrefillChunk, ...]
    """Next tokens of incomplete sequences that entered before."""
    is_dummy: bool = False
    """Compute only one token without KV, so that other ranks' collectives have a partner."""
    num_tokens_across_dp: tuple[int, ...] = ()
    """This step's tokens on each coupled DP rank; empty if ranks are not coupled."""
    graph_batch_size: int = 0
    """Coupled ranks only: the batch size of the graph that every rank runs; 0 means that all run eagerly."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at some positions, as columns; see `internal.v1.Logprobs`."""

    indexes: Int32Column  # [num_positions]
    ranks: Int32Column  # [num_positions + sum of requested_counts]
    counts: Int32Column  # [num_positions]
    token_ids: Int32Column  # [sum of counts]
    values: npt.NDArray[np.float32]  # [sum of counts]
    requested_counts: Int32Column | None = None  # [num_positions]; None means none anywhere


# (slot, its log-probabilities); `indexes` are positions in the prompt.
PromptLogprobs = tuple[tuple[int, Logprobs], ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Each row's tokens, in row order."""

    epoch: int
    step_id: int
    token_ids: Int32Column
    not_finite_rows: Int32Column
    """Rows (not slots) with logits that were not finite; their token is meaningless."""
    device_time_us: int
    counts: Int32Column | None = None  # [num_rows], tokens of each row; None means one each
    num_draft_tokens: int = 0
    logprobs: Logprobs | None = None
    """`indexes` are places in `token_ids`."""
    prompt_logprobs: PromptLogprobs = ()
    failed_grammar_rows: Int32Column = field(default_factory=lambda: _NO_TOKENS)
    """Rows with a grammar that cannot be followed further; their last token is meaningless."""
    num_replayed_tokens: int = 0
    """Greedy completion tokens computed again and compared."""
    num_replay_mismatches: int = 0
    """How many were not the most likely token."""
