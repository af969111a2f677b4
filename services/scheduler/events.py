"""What the engine is told, and what it says is to be done: data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.batch import Outputs, Step, StepResult
from services.scheduler.sequence import Priority
from shared.errors import ServiceError
from shared.limits import SamplingParams


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker answered when it was attached."""

    epoch: int
    model_digest: str
    context_length: int
    logits_width: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A request with every parameter resolved; `prompt` and `output` are little-endian int32.

    `attempt` counts the submissions of a request from 1, on whatever stream: a higher one supersedes a lower one in
    flight. `output` are the completion tokens that the client has from earlier ones. `age_s` is how long ago the
    request arrived, `time_left_s` how long its caller waits; None is for ever.
    """

    handle: int
    request_id: str
    prompt: bytes
    params: SamplingParams
    priority: Priority = Priority.NORMAL
    cache_salt: bytes = b""
    attempt: int = 1
    output: bytes = b""
    age_s: float = 0.0
    time_left_s: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerAttached:
    """A worker holds no sequences and waits for steps."""

    facts: WorkerFacts


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The link to the worker broke: the epoch has ended and its steps in flight are void."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StepReturned:
    """The worker answered a step."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """What a tokenizer replica wants; taken in the order of the fields."""

    client: int
    submissions: list[Submission] = field(default_factory=list)
    stop_ats: list[tuple[int, int]] = field(default_factory=list)
    """Handle, and completion tokens up to the stop."""
    aborts: list[int] = field(default_factory=list)
    """Handles."""


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


Event = WorkerAttached | WorkerLost | StepReturned | ClientMessage | ClientGone | AbortRequest | TimePassed


@dataclass(frozen=True, slots=True)
class SendStep:
    """Send a step to the worker."""

    step: Step


@dataclass(frozen=True, slots=True)
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
class DropWorker:
    """End the link to the worker, which answered nonsense or not in time; to the engine the epoch has ended."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process: this scheduler can never serve this worker."""

    reason: str


Action = SendStep | Deliver | CloseClient | DropWorker | Exit
