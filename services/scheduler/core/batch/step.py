"""What the scheduler plans for a worker, what comes back, and what goes on to clients: data only.

Plans and results do not change once they are made, and yet are not frozen: to make a frozen object takes three times
as long, and every step makes some.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.scheduler.core.batch.logprobs import Logprobs
from services.scheduler.core.batch.row_tokens import RowTokens
from services.scheduler.core.batch.sequence import TOKEN_BYTES, Finish, Sequence
from services.scheduler.core.batch.slot_table import IntColumn, RowConstants, Slots
from shared.errors import ServiceError
from shared.limits import SamplingParams

_NO_HANDLES = np.empty(0, np.uint32)
_NO_ROWS = np.empty(0, np.int32)


class StepKind(enum.Enum):
    """What a step computes: tokens of prompts, one token of each row, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(slots=True)
class PrefillChunk:
    """A sequence's next tokens, and how many follow with later steps before its first token is sampled."""

    slot: int
    token_bytes: bytes
    num_later_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.token_bytes) // TOKEN_BYTES


@dataclass(slots=True)
class EnteringSequence:
    """What a worker needs of a sequence that enters its batch, with its first chunk."""

    chunk: PrefillChunk
    num_cached_tokens: int
    num_prompt_tokens: int
    block_ids: array[int]
    params: SamplingParams
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that are not drawn before `min_tokens`."""
    cached_token_bytes: bytes = b""
    """The tokens before the chunk's, when the worker needs them."""
    max_num_tokens: int = 0


@dataclass(slots=True)
class ScheduledBatch:
    """One step's plan, as changes to the batch that the worker holds.

    `num_tokens` is what is computed. `row_slots` [num_rows] are the rows that get a token, in result order:
    `decode_slots`, then the chunks and the sequences that enter whose prompt is complete with this step;
    `partial_slots` are those whose is not. The worker derives the decodes (every sequence it holds that is complete,
    in the order of entry), so they travel only when `skips_rows` is set, because some sit the step out.
    `append_slots` and `append_block_ids` are parallel; a slot may stand there more than once.
    """

    kind: StepKind
    num_tokens: int
    row_slots: Slots
    decode_slots: Slots
    partial_slots: list[int]
    leave_slots: list[int]
    chunks: list[PrefillChunk]
    enters: list[EnteringSequence]
    append_slots: Slots
    append_block_ids: list[int]
    skips_rows: bool

    @property
    def is_dummy(self) -> bool:
        """Whether nothing is computed for any sequence: the step is for the other coupled ranks' collectives."""
        return not self.num_tokens


@dataclass(slots=True)
class StepCounts:
    """Steps by what they compute: prompts only, the next tokens only, both, or nothing for anybody."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    dummy: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.prefill + self.decode + self.mixed + self.dummy

    def add(self, batch: ScheduledBatch) -> None:
        """Count a step."""
        if batch.is_dummy:
            self.dummy += 1
        elif batch.kind is StepKind.DECODE:
            self.decode += 1
        elif batch.kind is StepKind.PREFILL:
            self.prefill += 1
        else:
            self.mixed += 1


@dataclass(slots=True)
class Step:
    """A batch on its way to its rank.

    Where ranks are coupled, `num_tokens_across_dp` has what each rank computes in this step, a dummy's one token
    included, and `graph_batch_size` the rows that a decode's captured graph must hold on each of them.
    """

    epoch: int
    step_id: int
    batch: ScheduledBatch
    num_tokens_across_dp: tuple[int, ...] = ()
    graph_batch_size: int = 0


class StepPace(NamedTuple):
    """What a step's duration depends on."""

    kind: StepKind
    num_tokens: int


@dataclass(slots=True)
class StepRecord:
    """A step in flight.

    It holds what it uses: a sequence that gets no row after this step stands in `retiring`, and gives its slot and
    its blocks back when the record returns, so that no step reuses them too early. Where ranks are coupled, `kind` and
    `num_tokens` are those of the rank that the others wait for: of a prefill if there is one, and the most tokens.
    """

    step_id: int
    kind: StepKind
    num_tokens: int
    row_slots: Slots
    partial_slots: list[int]
    sent_at: float
    retiring: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """A step's tokens as the worker sent them; `not_finite_rows` are row numbers whose token means nothing.

    `failed_grammar_rows` are those whose grammar could not be followed any further, and whose last token means nothing;
    those before it count. `counts` says how many of `token_ids` each row has; None is one each. `logprobs` count their
    positions in `token_ids`; `prompt_logprobs` are by slot, their positions those of the prompt.
    """

    epoch: int
    step_id: int
    token_ids: IntColumn
    not_finite_rows: IntColumn
    counts: IntColumn | None = None
    num_draft_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[tuple[int, Logprobs], ...] = ()
    failed_grammar_rows: IntColumn = field(default_factory=lambda: _NO_ROWS)
    num_replayed_tokens: int = 0
    """Greedy completion tokens that were computed again for sequences that came back."""
    num_replay_mismatches: int = 0
    """Of those, tokens that are not the likeliest of their place this time."""

    @property
    def num_accepted_tokens(self) -> int:
        """Of the tokens, those that were drafted: all but the one that is drawn behind them in each row."""
        num_rows = len(self.token_ids) if self.counts is None else int(np.count_nonzero(self.counts))
        return len(self.token_ids) - num_rows

    def rows(self, row_slots: Slots, num_draft_tokens: int) -> RowTokens:
        """The tokens by the rows of the step. Where the worker drafts, there are counts."""
        counts = self.counts
        if counts is None and num_draft_tokens:
            counts = np.ones(len(row_slots), np.int32)
        return RowTokens(row_slots, self.token_ids, counts, self.logprobs)


@dataclass(slots=True)
class RequestStart:
    """A choice got its first token; so much of its prompt came from the prefix cache."""

    handle: int
    num_cached_tokens: int


@dataclass(slots=True)
class RequestEnd:
    """The end of a choice: exactly one of `finish` and `error` is set."""

    handle: int
    num_completion_tokens: int = 0
    finish: Finish | None = None
    error: ServiceError | None = None
    num_resumes: int = 0
    """How often it went on after what computed it was lost, under earlier attempts as well."""
    is_resume_exact: bool = True
    """Whether nothing in its tokens can tell, as far as this scheduler knows."""

    @classmethod
    def failure(cls, seq: Sequence, error: ServiceError) -> RequestEnd:
        """The end of a choice that failed."""
        return cls(seq.handle, error=error, num_resumes=seq.num_resumes)


@dataclass(slots=True)
class Outputs:
    """What one client is told: a row a sequence that got tokens, and the choices that began and ended.

    `handles` uint32 and `first_indexes` int32 (of the row's first token among the completion tokens): [num_rows].
    `token_ids` int32: the rows' tokens one behind the other, `counts` of each row; None is one each. `logprobs` count
    their positions in `token_ids`; `prompt_logprobs` are by handle. `resumes` are handles that go on after a loss, with
    how often they have by now.
    """

    handles: np.ndarray[tuple[int], np.dtype[np.uint32]]
    first_indexes: IntColumn
    token_ids: IntColumn
    starts: list[RequestStart] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    counts: IntColumn | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    resumes: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def only_ends(cls, ends: list[RequestEnd]) -> Outputs:
        """Outputs that no step brought."""
        return cls(_NO_HANDLES, _NO_ROWS, _NO_ROWS, ends=ends)

    def set_rows(
        self, handles: np.ndarray[tuple[int], np.dtype[np.uint32]], first_indexes: IntColumn, rows: RowTokens
    ) -> None:
        """Set the rows, each with at least one token."""
        self.handles, self.first_indexes, self.token_ids = handles, first_indexes, rows.token_ids
        self.counts = None if len(rows.token_ids) == len(handles) else rows.counts
        self.logprobs = rows.logprobs


class OutputsByClient:
    """Collects one step's outputs, split by client."""

    def __init__(self) -> None:
        self.by_client: dict[int, Outputs] = {}

    def add_rows(self, constants: RowConstants, first_indexes: IntColumn, rows: RowTokens) -> None:
        """Add the rows that got tokens, each at least one; once."""
        if constants.only_client is not None:
            self._of(constants.only_client).set_rows(constants.handles, first_indexes, rows)
            return
        for client in np.unique(constants.clients):
            is_own = constants.clients == client
            self._of(int(client)).set_rows(constants.handles[is_own], first_indexes[is_own], rows.of_rows(is_own))

    def add_prompt_logprobs(self, client: int, handle: int, logprobs: Logprobs) -> None:
        """Add those of the next tokens of a request's prompt."""
        self._of(client).prompt_logprobs.append((handle, logprobs))

    def add_start(self, client: int, start: RequestStart) -> None:
        """Add a choice that began."""
        self._of(client).starts.append(start)

    def add_resume(self, seq: Sequence) -> None:
        """Add a choice that goes on after a loss."""
        self._of(seq.client).resumes.append((seq.handle, seq.num_resumes))

    def add_end(self, client: int, end: RequestEnd) -> None:
        """Add a choice that ended."""
        self._of(client).ends.append(end)

    def _of(self, client: int) -> Outputs:
        if client not in self.by_client:
            self.by_client[client] = Outputs.only_ends([])
        return self.by_client[client]
