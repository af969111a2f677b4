"""A request as the cell takes it, and its answer so far."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.ids import RequestHandle
from shared.request.sampling_params import SamplingParams
from shared.tenants.tenant import DEFAULT_TENANT, Tenant

_NO_HANDLE = RequestHandle(0)


@dataclass(slots=True, eq=False)
class RequestChoice:
    """One choice of a request."""

    request: ResolvedRequest
    has_begun: bool = False
    has_ended: bool = False
    output: array[int] = field(default_factory=lambda: array("i"))
    """Completion tokens so far."""
    num_resumes: int = 0
    """Resumes after a loss, as far as is known."""


@dataclass(slots=True, eq=False)
class ResolvedRequest:
    """A prompt with all parameters resolved, and the state of its submissions.

    What the client asked for never changes. The rest belongs to `RequestLedger`: each submission is an attempt, on
    whatever stream.
    """

    request_id: str
    prompt: bytes
    """Little-endian int32."""
    sampling: SamplingParams
    priority: int = 0
    """A `lockstep.v1.Priority`."""
    cache_salt: bytes = b""
    n: int = 1
    """The number of choices."""
    is_exact: bool = False
    """Whether the bytes must depend only on model, prompt and parameters."""
    tenant: Tenant = DEFAULT_TENANT
    needs: frozenset[str] = frozenset()
    """The capabilities that it needs of its cell; known from its submission on."""

    arrived_at: float = 0.0
    deadline_at: float | None = None
    """When the caller stops waiting; None means never."""
    handle: RequestHandle = _NO_HANDLE
    """Its first choice's; choice i has `handle + i`."""
    choices: list[RequestChoice] = field(default_factory=list)
    num_attempts: int = 0
    stream: int | None = None
    """The current stream, if submitted there."""
    awaits_token: bool = False
    """Whether no token has arrived since the submission."""
    fingerprints: set[str] = field(default_factory=set)
    """Exact fingerprints of its cells so far; empty for a cell that is not exact."""
    num_prompt_positions: int = 1
    """Prompt positions whose log-probabilities are known. The first has none."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt's token ids, without a copy."""
        return memoryview(self.prompt).cast("i")

    @property
    def has_output(self) -> bool:
        """Whether anything is known of the answer."""
        return any(choice.output or choice.has_ended for choice in self.choices)

    @property
    def resumes_exactly(self) -> bool:
        """Whether no byte can reveal a resume: all cells were exact, with one fingerprint."""
        return len(self.fingerprints) == 1 and "" not in self.fingerprints

    @property
    def resubmission_order(self) -> tuple[bool, float, int]:
        """Sort key: requests with output first, then by age."""
        return not self.has_output, self.arrived_at, self.handle

    def may_resume_with(self, fingerprint: str) -> bool:
        """Whether a cell with this fingerprint, possibly empty, can continue it without changing its bytes."""
        return not self.is_exact or (bool(fingerprint) and self.fingerprints <= {fingerprint})

    def begin_attempt(self, stream: int, fingerprint: str) -> None:
        """Note a submission; any but the first resumes its choices."""
        for choice in self.choices:
            choice.num_resumes += self.num_attempts > 0
        self.stream = stream
        self.num_attempts += 1
        self.awaits_token = True
        self.fingerprints.add(fingerprint)
