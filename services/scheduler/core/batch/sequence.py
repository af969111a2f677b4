"""The sequences of requests; what every step touches is in `SlotTable`."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from services.scheduler.core.cache.cached_prefix import CachedPrefix, PrefixCursor
from shared.ids import DpRank, RequestHandle, Slot
from shared.request.limits import TOKEN_DTYPE
from shared.request.sampling_params import NO_OPTIONS, Pooling, SamplingParams
from shared.tenants.tenant import DEFAULT_TENANT, Tenant

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


class RequestKey(NamedTuple):
    """What a cell knows a request by: tenants choose their ids independently."""

    tenant: str
    id: str


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
    tenant: Tenant = DEFAULT_TENANT
    tenant_number: int = 0
    """The number of its tenant's account; known once it has been queued."""
    is_counted: bool = False
    """Whether that account counts it among the unfinished ones."""
    num_tokens_when_made_way: int = 0
    """How many tokens it had when it last made way for another tenant."""
    pays_again: bool = False
    """Whether its tenant is charged for its next prefill, because it made way for the tenant's own growth."""
    num_unpaid_tokens: int = 0
    """Prompt tokens for which its tenant has not been charged yet; it is charged as they are sent."""
    cache_salt: bytes = b""
    attempt: int = 1
    """The attempt as which it waits; see `Submission.waits_as_new`."""
    choice: int = 0
    num_choices: int = 1
    """Choices of its request that wait with it at first."""
    is_leader: bool = True
    """Whether its prompt counts towards the queue's token limit: one choice of each request."""
    queued_at: float = 0.0
    """When it last entered the waiting queue."""
    waited_s: float = 0.0
    """Time in the waiting queue before `queued_at`."""
    dequeued_at: float = 0.0
    """When it last left the waiting queue."""
    status: SequenceStatus = SequenceStatus.WAITING
    type: SequenceType = SequenceType.PREFILL
    slot: Slot | None = None
    is_retiring: bool = False
    """Whether it gets no further row, and waits for its last step in flight."""
    block_table: array[int] = field(default_factory=lambda: array("i"))
    prefix_cursor: PrefixCursor = field(default_factory=PrefixCursor)
    cached_prefix: CachedPrefix | None = None
    """What the last lookup found while it waits."""
    num_unsent_tokens: int = 0
    """While it is prefilled in chunks: tokens neither cached nor sent."""
    save_points: tuple[int, ...] = ()
    """While it is prefilled: after how many tokens its recurrent state is yet to be saved, ascending."""
    last_record_at: int = 0
    """The number of tokens after which its state was last saved while it decodes; 0 for none."""
    num_first_cached_tokens: int | None = None
    """Tokens that were cached when it was first admitted."""
    on_admission: Callable[[Sequence], None] | None = None
    """Called when it is admitted for the first time."""
    last_prompt_logprob: int = 0
    """The last prompt position whose log-probabilities its client has; 0 for none."""
    left_at: float | None = None
    finish: Finish | None = None
    rank: DpRank | None = None
    """The DP rank it is placed on, if any."""
    num_earlier_tokens: int = 0
    """Completion tokens of earlier attempts."""
    is_exact: bool = False
    """Whether its tokens must depend only on the model, the prompt and the parameters."""
    exact_fingerprint: str | None = None
    """Promised for its tokens; None until a model is known."""
    num_resumes: int = 0
    """Including earlier attempts."""
    numerics: Numerics | None = None
    """The joint numerics of what computed it before its last loss."""
    key: RequestKey = field(init=False)
    """Its request; `id` alone is for logs and errors."""

    def __post_init__(self) -> None:
        self.key = RequestKey(self.tenant.name, self.id)

    def note_admission(self, num_cached_tokens: int) -> None:
        """Record an admission with so many cached tokens."""
        if self.num_first_cached_tokens is None:
            self.num_first_cached_tokens = num_cached_tokens
            if self.on_admission is not None:
                self.on_admission(self)

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
    def num_limited_tokens(self) -> int:
        """What it adds to the waiting tokens that limits count: the prompt, for one choice of each request."""
        return self.num_prompt_tokens if self.is_leader else 0

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
    def reads_whole_prompt(self) -> bool:
        """Whether its next prefill must compute all of its prompt, cached or not; all tokens must be stored."""
        options = self.params.options
        return self.wants_prompt_logprobs or (options is not None and options.pooling is Pooling.MEAN)

    @property
    def num_stored_tokens(self) -> int:
        """All its tokens, unless it is running."""
        return len(self.token_bytes) // TOKEN_BYTES

    @property
    def max_num_tokens(self) -> int:
        """The most prompt and completion tokens."""
        return self.num_prompt_tokens + self.params.max_tokens
