"""The engine's input (events) and output (actions).

Never changed once made; for why some are not frozen, see `services.scheduler.core.batch.step`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.core.batch.sequence import Priority, RequestKey
from services.scheduler.core.batch.step import Step
from services.scheduler.core.results.outputs import Outputs
from services.scheduler.core.worker_facts import WorkerFacts
from shared.errors import ServiceError
from shared.ids import DpRank, RequestHandle
from shared.request.sampling_params import SamplingParams
from shared.step.step import StepResult
from shared.tenants.tenant import DEFAULT_TENANT, Tenant


@dataclass(frozen=True, slots=True)
class ChoiceSoFar:
    """What a client has of one choice."""

    output: bytes = b""
    """Completion tokens, little-endian int32."""
    has_ended: bool = False


@dataclass(slots=True)
class Submission:
    """A request with every parameter resolved."""

    handle: RequestHandle
    """Choice i of `n` answers under `handle` + i."""
    request_id: str
    prompt: bytes
    """Little-endian int32."""
    params: SamplingParams
    priority: Priority = Priority.NORMAL
    cache_salt: bytes = b""
    attempt: int = 1
    """A number from 1, on any stream; a higher attempt supersedes a lower one in flight."""
    waits_as_new: bool = False
    """Whether it waits and pays as a first attempt: that there were others is a direct client's word alone."""
    n: int = 1
    choices_so_far: tuple[ChoiceSoFar, ...] = ()
    """What earlier attempts said: empty, or one entry per choice."""
    age_s: float = 0.0
    """Seconds since the request arrived."""
    time_left_s: float | None = None
    """None means for ever."""
    is_exact: bool = False
    """As in `Sequence`."""
    num_earlier_resumes: int = 0
    tenant: Tenant = DEFAULT_TENANT
    needs: frozenset[str] = frozenset()
    """The capabilities that it needs of the cell's services."""

    @property
    def key(self) -> RequestKey:
        """What the cell knows it by."""
        return RequestKey(self.tenant.name, self.request_id)

    def handle_of(self, choice: int) -> RequestHandle:
        """Under which handle a choice answers."""
        return RequestHandle(self.handle + choice)

    @property
    def open_choices(self) -> list[int]:
        """Choices whose ends the client does not have."""
        if not self.choices_so_far:
            return list(range(self.n))
        return [choice for choice, so_far in enumerate(self.choices_so_far) if not so_far.has_ended]


@dataclass(frozen=True, slots=True)
class DomainAttached:
    """All groups of a domain have empty batches and wait for steps of one epoch."""

    domain: int
    facts: tuple[WorkerFacts, ...]
    """In the order of `CellTopology.ranks_of(domain)`."""


@dataclass(frozen=True, slots=True)
class DomainLost:
    """A link to a domain broke: its epoch has ended, and its steps in flight are void."""

    domain: int
    epoch: int


@dataclass(slots=True)
class StepReturned:
    """A DP rank returned a step's result."""

    rank: DpRank
    result: StepResult


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """A DP rank sent a heartbeat; `progress` increases while its device makes progress.

    `is_leaving` says that its domain's workers were asked to end.
    """

    rank: DpRank
    epoch: int
    progress: int
    is_leaving: bool = False


@dataclass(slots=True)
class ClientMessage:
    """A message from a tokenizer replica; its fields are handled in order."""

    client: int
    submissions: list[Submission] = field(default_factory=list)
    stop_ats: list[tuple[RequestHandle, int]] = field(default_factory=list)
    """Handles of choices, and their numbers of completion tokens up to the stop."""
    aborts: list[RequestHandle] = field(default_factory=list)
    """Handles of requests."""


@dataclass(frozen=True, slots=True)
class ClientClosed:
    """A replica's stream ended; its requests are aborted."""

    client: int


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Another call ends a tenant's request, of any client; an unknown id is ignored."""

    request_id: str
    tenant: str = DEFAULT_TENANT.name


@dataclass(frozen=True, slots=True)
class DrainRank:
    """An operator wants no work on a rank's domain; its sequences may finish there for the drain time."""

    rank: DpRank


@dataclass(frozen=True, slots=True)
class UndrainRank:
    """An operator takes `DrainRank` back."""

    rank: DpRank


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a group's leader may be reached, as discovery reports it."""

    address: str
    is_ready: bool = True
    is_terminating: bool = False
    """Whether its process was asked to end, or soon will be."""
    zone: str | None = None
    """None if it is not known."""


@dataclass(frozen=True, slots=True)
class EndpointsFound:
    """Discovery knows these endpoints now, and no others; each address occurs once."""

    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The moment returned by `Engine.next_wakeup` has come."""


Event = (
    DomainAttached
    | DomainLost
    | StepReturned
    | RankHeartbeat
    | ClientMessage
    | ClientClosed
    | AbortRequest
    | DrainRank
    | UndrainRank
    | EndpointsFound
    | TimePassed
)


@dataclass(slots=True)
class SendStep:
    """Send a step to a DP rank."""

    rank: DpRank
    step: Step


@dataclass(slots=True)
class Deliver:
    """Send outputs to a client."""

    client: int
    outputs: Outputs


@dataclass(frozen=True, slots=True)
class CloseClient:
    """End a client's stream for breaking the protocol."""

    client: int
    error: ServiceError


@dataclass(frozen=True, slots=True)
class DropDomain:
    """Close the links to a domain whose epoch the engine has ended."""

    domain: int
    epoch: int
    reason: str
    retry_s: float | None = None
    """After how many seconds to attach it again; None means as after any loss."""
    is_repeated: bool = False
    """Whether it was dropped for the same reason before."""


@dataclass(frozen=True, slots=True)
class ReleaseDomain:
    """Close the links to a domain that was drained: its epoch has ended as planned."""

    domain: int
    epoch: int


@dataclass(frozen=True, slots=True)
class LinkDomain:
    """Begin to attach a domain whose endpoint was found; the domain has no link."""

    domain: int
    address: str


@dataclass(frozen=True, slots=True)
class UnlinkDomain:
    """Close the link to a domain, which is not attached: its endpoint is terminating or gone."""

    domain: int


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process: it can never serve these workers, or another scheduler has them."""

    reason: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Send a heartbeat to all workers and replicas; `progress` increases with every step sent."""

    progress: int


Action = SendStep | Deliver | CloseClient | DropDomain | ReleaseDomain | LinkDomain | UnlinkDomain | Beat | Exit
