"""What the engine is told, and what it says is to be done: data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.batch import Outputs, Step, StepResult
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
    """A request with every parameter resolved; `prompt` is little-endian int32."""

    handle: int
    request_id: str
    prompt: bytes
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class WorkerAttached:
    """A worker holds no sequences and waits for steps."""

    facts: WorkerFacts


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The link to the worker broke; its steps in flight are lost."""

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


Event = WorkerAttached | WorkerLost | StepReturned | ClientMessage | ClientGone | AbortRequest


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
    """End the link to the worker: what it answered makes no sense."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process: this scheduler can never serve this worker."""

    reason: str


Action = SendStep | Deliver | CloseClient | DropWorker | Exit
