"""One step as the worker's domain sees it: what changes in the batch, what is computed, what came of it.

Plain data. It crosses from the RPC thread to the main thread and back, so it is frozen.
"""

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
    """A sequence's next tokens, whose KV the step computes. Nothing of it has been checked."""

    slot: int
    # Prompt, then completion.
    token_ids: Int32Column
    # Tokens that later steps bring; 0: the sequence is complete, and a token is sampled for it.
    num_later_tokens: int


@dataclass(frozen=True, slots=True)
class EnteringSequence:
    """A sequence that enters the batch. Nothing of it has been checked."""

    # Its first tokens whose KV is not cached.
    chunk: PrefillChunk
    num_cached_tokens: int
    num_prompt_tokens: int
    block_ids: Int32Column
    temperature: float
    top_k: int
    top_p: float
    seed: int
    # Prompt and most completion tokens together.
    max_num_tokens: int
    choice: int = 0
    options: SamplingOptions | None = None
    # Tokens that are not drawn before `options.min_tokens`.
    stop_token_ids: Int32Column = field(default_factory=lambda: _NO_TOKENS)
    # The tokens before the chunk's, when options or drafts need them.
    cached_token_ids: Int32Column = field(default_factory=lambda: _NO_TOKENS)


@dataclass(frozen=True, slots=True)
class Step:
    """Changes to the batch, applied in the order of the fields, and what is computed then."""

    epoch: int
    step_id: int
    kind: StepKind
    leave_slots: Int32Column
    enters: tuple[EnteringSequence, ...]
    # Parallel columns; a slot that gets several blocks stands there several times.
    append_slots: Int32Column
    append_block_ids: Int32Column
    # The sequences that are decoded; None: all complete ones that were in the batch before, in the order they entered.
    decode_slots: Int32Column | None
    # Next tokens of sequences that entered before and are not complete.
    chunks: tuple[PrefillChunk, ...]
    # Nothing is computed for any sequence: one token whose KV goes nowhere meets the other ranks' collectives.
    is_dummy: bool = False
    # Tokens of this step on each coupled DP rank; empty where ranks are not coupled.
    num_tokens_across_dp: tuple[int, ...] = ()
    # Rows that a captured graph must hold on every coupled rank.
    graph_batch_size: int = 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at some positions, as columns; see `internal.v1.Logprobs`."""

    indexes: Int32Column  # [num_positions]
    ranks: Int32Column  # [num_positions]
    counts: Int32Column  # [num_positions]
    token_ids: Int32Column  # [sum of counts]
    values: npt.NDArray[np.float32]  # [sum of counts]


# By slot; their indexes are positions in the prompt.
PromptLogprobs = tuple[tuple[int, Logprobs], ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The rows' tokens, in row order."""

    epoch: int
    step_id: int
    token_ids: Int32Column
    # Rows (not slots) whose logits were not finite; their token means nothing.
    not_finite_rows: Int32Column
    device_time_us: int
    # Tokens of each row, [num_rows]; None: one each.
    counts: Int32Column | None = None
    num_draft_tokens: int = 0
    # Their indexes count in `token_ids`.
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs = ()
    # Rows whose grammar cannot be followed any further; their last token means nothing.
    failed_grammar_rows: Int32Column = field(default_factory=lambda: _NO_TOKENS)
    # Greedy completion tokens that were computed again, and those of them that are not the likeliest this time.
    num_replayed_tokens: int = 0
    num_replay_mismatches: int = 0
