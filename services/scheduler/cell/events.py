"""What the engine is told, and what it says is to be done: data only.

Events do not change; those that come with each step or request are not frozen, for the reason that `batch` gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.batch.sequence import Priority
from services.scheduler.core.batch.step import Outputs, Step, StepResult
from services.scheduler.core.worker_facts import WorkerFacts
from shared.errors import ServiceError
from shared.limits import SamplingParams


@dataclass(frozen=True, slots=True)
class ChoiceSoFar:
    """What a client has of one choice: `output` are its completion tokens, little-endian int32."""

    output: bytes = b""
    has_ended: bool = False


@dataclass(slots=True)
class Submission:
    """A request with every parameter resolved; `prompt` is little-endian int32.

    Choice i of `n` answers under `handle` + i. `attempt` counts the submissions of a request from 1, on whatever
    stream: a higher one supersedes a lower one in flight. `choices_so_far` is what the client has from earlier ones:
    nothing, or an entry a choice. `age_s` is how long ago the request arrived, `time_left_s` how long its caller waits;
    None is for ever.
    """

    handle: int
    request_id: str
    prompt: bytes
    params: SamplingParams
    priority: Priority = Priority.NORMAL
    cache_salt: bytes = b""
    attempt: int = 1
    n: int = 1
    choices_so_far: tuple[ChoiceSoFar, ...] = ()
    age_s: float = 0.0
    time_left_s: float | None = None
    is_exact: bool = False
    """Whether the answer's bytes may depend on nothing but model, prompt and parameters."""
    num_earlier_resumes: int = 0
    """Recoveries under earlier attempts."""

    @property
    def open_choices(self) -> list[int]:
        """The choices whose ends the client does not have."""
        if not self.choices_so_far:
            return list(range(self.n))
        return [choice for choice, so_far in enumerate(self.choices_so_far) if not so_far.has_ended]


@dataclass(frozen=True, slots=True)
class DomainAttached:
    """Every group of a failure domain holds no sequences and waits for steps under one epoch.

    `facts` are those of its DP ranks, in their order: `CellTopology.ranks_of(domain)`. All have the same epoch.
    """

    domain: int
    facts: tuple[WorkerFacts, ...]


@dataclass(frozen=True, slots=True)
class DomainLost:
    """The link to one of a domain's groups broke: the epoch has ended and its steps in flight are void."""

    domain: int
    epoch: int


@dataclass(slots=True)
class StepReturned:
    """A DP rank answered a step."""

    rank: int
    result: StepResult


@dataclass(frozen=True, slots=True)
class WorkerHeard:
    """A DP rank gave a sign of life; `progress` grows while its device gets on."""

    rank: int
    epoch: int
    progress: int


@dataclass(slots=True)
class ClientMessage:
    """What a tokenizer replica wants; taken in the order of the fields."""

    client: int
    submissions: list[Submission] = field(default_factory=list)
    stop_ats: list[tuple[int, int]] = field(default_factory=list)
    """A choice's handle, and its completion tokens up to the stop."""
    aborts: list[int] = field(default_factory=list)
    """Handles of requests, all whose choices end."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A replica's stream ended; its requests are aborted."""

    client: int


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Somebody wants a request, whichever client's, to end; nothing happens when none has the id."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing but time: a moment that `Engine.next_wakeup` named has come."""


Event = (
    DomainAttached | DomainLost | StepReturned | WorkerHeard | ClientMessage | ClientGone | AbortRequest | TimePassed
)


@dataclass(slots=True)
class SendStep:
    """Send a step to a DP rank."""

    rank: int
    step: Step


@dataclass(slots=True)
class Deliver:
    """Send outputs to a client."""

    client: int
    outputs: Outputs


@dataclass(frozen=True, slots=True)
class CloseClient:
    """End a client's stream with an error: it broke the protocol."""

    client: int
    error: ServiceError


@dataclass(frozen=True, slots=True)
class DropDomain:
    """End the links to a domain: it sent an invalid result, or none in time. For the engine its epoch has ended."""

    domain: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process: this scheduler can never serve these workers, or another one has taken them."""

    reason: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Give every worker and every replica a sign of life; `progress` grows with every step that is sent."""

    progress: int


Action = SendStep | Deliver | CloseClient | DropDomain | Beat | Exit
