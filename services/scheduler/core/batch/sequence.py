"""The sequences of requests; what every step touches is in `SlotTable`."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field, replace

from services.scheduler.core.batch.cached_prefix import CachedPrefix, PrefixCursor
from shared.ids import DpRank, RequestHandle, Slot
from shared.limits import NO_OPTIONS, TOKEN_DTYPE, SamplingParams

TOKEN_BYTES = TOKEN_DTYPE.itemsize


class SequenceStatus(enum.Enum):
    """The stages of a sequence's life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    EXIT_ENGINE = "exit_engine"


class SequenceType(enum.Enum):
    """What the next step computes; a dummy only keeps coupled ranks in step."""

    DUMMY = "dummy"
    PREFILL = "prefill"
    DECODE = "decode"


class Priority(enum.IntEnum):
    """Lower numbers go first."""

    HIGH = 1
    NORMAL = 2
    LOW = 3


class FinishReason(enum.Enum):
    """Why a sequence finished. An abort or a failure is not a finish."""

    EOS = "eos"
    STOP_SEQUENCE = "stop_sequence"
    STOP_TOKEN = "stop_token"  # noqa: S105 - no password
    STOP_STRING = "stop_string"
    MAX_TOKENS = "max_tokens"


@dataclass(frozen=True, slots=True)
class Finish:
    """A finish reason and its details."""

    reason: FinishReason
    stop_token_id: int | None = None

    @property
    def leave_reason(self) -> str:
        """In ATOM's terms: `stop_{token_id}` for a stop token."""
        return f"stop_{self.stop_token_id}" if self.reason is FinishReason.STOP_TOKEN else self.reason.value


@dataclass(frozen=True, slots=True)
class Numerics:
    """What results depend on: equal and exact numerics give bitwise equal results."""

    fingerprint: str
    is_exact: bool

    def is_continued_by(self, other: Numerics) -> bool:
        """Whether the tokens are the same as if `other` had not taken over."""
        return self.is_exact and self == other

    def joined_with(self, other: Numerics) -> Numerics:
        """The numerics of a sequence that both computed."""
        return self if self.is_continued_by(other) else replace(self, is_exact=False)


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the tokens generated for it: one choice of a request.

    Invariant: it has a slot exactly while it is RUNNING or a step in flight still names it. `token_bytes` holds every
    token except those in the slot's ring. A WAITING sequence with a slot is parked (see `Preemption`).
    """

    id: str
    client: int
    handle: RequestHandle
    params: SamplingParams
    token_bytes: bytearray
    num_prompt_tokens: int
    arrived_at: float
    priority: Priority = Priority.NORMAL
    cache_salt: bytes = b""
    attempt: int = 1
    choice: int = 0
    is_leader: bool = True
    """Whether its prompt counts towards the queue's token limit: one choice of each request."""
    queued_at: float = 0.0
    """When it last entered the waiting queue."""
    waited_s: float = 0.0
    """Time in the waiting queue before `queued_at`."""
    status: SequenceStatus = SequenceStatus.WAITING
    type: SequenceType = SequenceType.PREFILL
    slot: Slot | None = None
    is_retiring: bool = False
    """Whether it gets no further row, and waits for its last step in flight."""
    block_table: array[int] = field(default_factory=lambda: array("i"))
    prefix_cursor: PrefixCursor = field(default_factory=PrefixCursor)
    cached_prefix: CachedPrefix | None = None
    """From the last lookup while it waits."""
    num_unsent_tokens: int = 0
    """While it is prefilled in chunks: tokens neither cached nor sent."""
    num_first_cached_tokens: int | None = None
    last_prompt_logprob: int = 0
    """The last prompt position whose log-probabilities its client has; 0 for none."""
    first_token_at: float | None = None
    left_at: float | None = None
    finish: Finish | None = None
    rank: DpRank | None = None
    """The DP rank it is placed on, if any."""
    is_exact: bool = False
    """Whether its tokens must depend only on the model, the prompt and the parameters."""
    exact_fingerprint: str | None = None
    """Promised for its tokens; None until a model is known."""
    num_resumes: int = 0
    """Including earlier attempts."""
    numerics: Numerics | None = None
    """The joint numerics of what computed it before its last loss."""

    def leave_worker(self) -> None:
        """Become a waiting sequence without slot or blocks; all tokens must be stored."""
        self.status, self.type = SequenceStatus.WAITING, SequenceType.PREFILL
        self.slot = None
        self.is_retiring = False
        self.block_table = array("i")
        self.prefix_cursor = PrefixCursor()
        self.num_unsent_tokens = 0

    def drop_prompt_logprobs(self) -> None:
        """Stop asking for prompt log-probabilities."""
        assert self.params.options is not None
        options = replace(self.params.options, num_prompt_logprobs=None)
        self.params = replace(self.params, options=None if options == NO_OPTIONS else options)

    @property
    def was_admitted(self) -> bool:
        """Whether it was ever scheduled, by this scheduler or a previous one."""
        return self.num_first_cached_tokens is not None or self.attempt > 1

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether its options ask for prompt log-probabilities."""
        return self.params.options is not None and self.params.options.num_prompt_logprobs is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether its next prefill must return prompt log-probabilities; all tokens must be stored.

        Choice 0 gets them for the whole request, until it has a completion token.
        """
        return self.has_prompt_logprobs and not self.choice and self.num_stored_tokens == self.num_prompt_tokens

    @property
    def num_stored_tokens(self) -> int:
        """All its tokens, unless it is running."""
        return len(self.token_bytes) // TOKEN_BYTES

    @property
    def max_num_tokens(self) -> int:
        """The most prompt and completion tokens."""
        return self.num_prompt_tokens + self.params.max_tokens
