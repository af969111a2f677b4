"""One token stream generated for a request: the object a reader meets.

It holds what is per-request and cold. What every step touches stands in the columns of `SlotTable`, at the
sequence's slot, so that a step costs Python only for the rows where something happens.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field, replace

from services.scheduler.core.batch.cached_prefix import CachedPrefix, PrefixCursor
from shared.limits import NO_OPTIONS, TOKEN_DTYPE, SamplingParams

TOKEN_BYTES = TOKEN_DTYPE.itemsize


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    EXIT_ENGINE = "exit_engine"


class SequenceType(enum.Enum):
    """What the next step computes of a sequence; a dummy only keeps coupled ranks in step."""

    DUMMY = "dummy"
    PREFILL = "prefill"
    DECODE = "decode"


class Priority(enum.IntEnum):
    """How urgent a request is: the lower number goes first."""

    HIGH = 1
    NORMAL = 2
    LOW = 3


class FinishReason(enum.Enum):
    """Why a sequence finished. An abort or a failure is no finish."""

    EOS = "eos"
    STOP_SEQUENCE = "stop_sequence"
    STOP_TOKEN = "stop_token"  # noqa: S105 - no password
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"


@dataclass(frozen=True, slots=True)
class Finish:
    """A finish reason with what belongs to it."""

    reason: FinishReason
    stop_token_id: int | None = None

    @property
    def leave_reason(self) -> str:
        """The reason in ATOM's words: `stop_{token_id}` for a stop token."""
        return f"stop_{self.stop_token_id}" if self.reason is FinishReason.STOP_TOKEN else self.reason.value


@dataclass(frozen=True, slots=True)
class Numerics:
    """What results depend on: they are bitwise equal where exact fingerprints are."""

    fingerprint: str
    is_exact: bool

    def is_continued_by(self, other: Numerics) -> bool:
        """Whether nothing in the tokens tells where `other` took over."""
        return self.is_exact and self == other

    def joined_with(self, other: Numerics) -> Numerics:
        """What a sequence that both computed depends on."""
        return self if self.is_continued_by(other) else replace(self, is_exact=False)


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what was generated for it: one choice of a request.

    Invariant: it has a slot exactly while it is RUNNING or a step in flight still names it. `token_bytes` holds
    every token but those of the slot's current run, which `SlotTable.flush` appends. A WAITING sequence with a slot
    is parked: it was preempted, and what its steps in flight bring still counts.
    """

    id: str
    client: int
    handle: int
    params: SamplingParams
    token_bytes: bytearray
    num_prompt_tokens: int
    arrive_time: float
    priority: Priority = Priority.NORMAL
    cache_salt: bytes = b""
    attempt: int = 1
    choice: int = 0
    """Which of its request's choices it is."""
    is_leader: bool = True
    """Whether its request's prompt counts for it where many wait: for one choice of each request it does."""
    queued_at: float = 0.0
    """When it entered the waiting queue the last time."""
    waited_s: float = 0.0
    """How long it stood in the waiting queue before that."""
    status: SequenceStatus = SequenceStatus.WAITING
    type: SequenceType = SequenceType.PREFILL
    slot: int | None = None
    is_retiring: bool = False
    """Whether it gets no further row, and its last step in flight gives back what it holds."""
    block_table: array[int] = field(default_factory=lambda: array("i"))
    """Block ids, as int32."""
    prefix_cursor: PrefixCursor = field(default_factory=PrefixCursor)
    cached_prefix: CachedPrefix | None = None
    """While it waits: what the last look into the prefix cache found."""
    num_unsent_tokens: int = 0
    """While it is prefilled in chunks: the tokens that no step has computed or is on its way to."""
    num_first_cached_tokens: int | None = None
    last_prompt_logprob: int = 0
    """The last position of the prompt whose log-probabilities its client was told; those of the first are unknown."""
    first_token_time: float | None = None
    leave_time: float | None = None
    finish: Finish | None = None
    rank: int | None = None
    """The DP rank that it is placed on; none while it waits for one."""
    exact_fingerprint: str | None = None
    """Of the exact numerics that were promised for its tokens, empty until a rank is known; None: nothing was."""
    num_resumes: int = 0
    """How often it went on after what computed it was lost, under earlier attempts as well."""
    numerics: Numerics | None = None
    """What computed it before the last loss, and with it all that did so before."""

    def leave_worker(self) -> None:
        """Become a waiting sequence that holds nothing; all its tokens must be stored."""
        self.status, self.type = SequenceStatus.WAITING, SequenceType.PREFILL
        self.slot = None
        self.is_retiring = False
        self.block_table = array("i")
        self.prefix_cursor = PrefixCursor()
        self.num_unsent_tokens = 0

    def drop_prompt_logprobs(self) -> None:
        """Ask for the log-probabilities of its prompt no more."""
        assert self.params.options is not None
        options = replace(self.params.options, num_prompt_logprobs=None)
        self.params = replace(self.params, options=None if options == NO_OPTIONS else options)

    @property
    def was_admitted(self) -> bool:
        """Whether it was ever scheduled, by this scheduler or by the one before it."""
        return self.num_first_cached_tokens is not None or self.attempt > 1

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of its prompt are among its options."""
        return self.params.options is not None and self.params.options.num_prompt_logprobs is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its next prefill is to bring the log-probabilities of its prompt; all its tokens must be stored.

        Choice 0 brings them for all of its request, until it has a token of its own: they come before that.
        """
        return self.has_prompt_logprobs and not self.choice and self.num_stored_tokens == self.num_prompt_tokens

    @property
    def num_stored_tokens(self) -> int:
        """Tokens in `token_bytes`: all known ones unless it is running."""
        return len(self.token_bytes) // TOKEN_BYTES

    @property
    def max_num_tokens(self) -> int:
        """Prompt and completion tokens together end here."""
        return self.num_prompt_tokens + self.params.max_tokens
