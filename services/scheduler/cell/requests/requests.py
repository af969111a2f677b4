"""The requests of a cell."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.cell.requests.deadlines import Deadlines
from services.scheduler.cell.requests.tenant_loads import TenantLoads
from services.scheduler.core.batch.sequence import RequestKey, Sequence
from services.scheduler.core.policy import SchedulerPolicy
from shared.ids import RequestHandle
from shared.tenants.tenant import Tenant

ClientHandle = tuple[int, int]
"""Client and handle."""


@dataclass(slots=True, eq=False)
class Request:
    """Choice i answers under `handle` + i."""

    key: RequestKey
    client: int
    handle: RequestHandle
    attempt: int
    tenant: Tenant
    choices: list[Sequence]
    """Choices that have not ended."""
    submitted_at: float
    """A time of the engine's clock, as `deadline`."""
    deadline: float | None = None
    num_prompt_logprob_bytes: int = 0
    """An upper limit."""
    needs: frozenset[str] = frozenset()
    """The capabilities that it needs of every worker."""


class RequestTable:
    """Requests by handle, tenant and id, client and deadline.

    Invariant: a request is here while any of its choices is, under its own handle even when choice 0 has ended.
    `loads` are those of their choices, with the bytes of all requests.
    """

    def __init__(self, policy: SchedulerPolicy) -> None:
        self.loads = TenantLoads(policy)
        self._requests: dict[ClientHandle, Request] = {}
        self._key_to_request: dict[RequestKey, Request] = {}
        self._choices: dict[ClientHandle, tuple[Request, Sequence]] = {}
        self._deadlines = Deadlines()

    @property
    def first_deadline(self) -> float | None:
        """The earliest deadline, if any."""
        return self._deadlines.first

    def by_key(self, key: RequestKey) -> Request | None:
        """The request of any client; None if unknown."""
        return self._key_to_request.get(key)

    def by_handle(self, client: int, handle: RequestHandle) -> Request | None:
        """The request with a handle (of its choice 0); None if unknown."""
        return self._requests.get((client, handle))

    def choice(self, client: int, handle: RequestHandle) -> Sequence | None:
        """The choice with a handle; None if unknown."""
        entry = self._choices.get((client, handle))
        return None if entry is None else entry[1]

    def has_request_of(self, seq: Sequence) -> bool:
        """Whether a choice's request is here: it has not ended, and no later attempt has replaced it."""
        return (seq.client, RequestHandle(seq.handle - seq.choice)) in self._requests

    def all(self) -> list[Request]:
        """Every request."""
        return list(self._key_to_request.values())

    def of_client(self, client: int) -> list[Request]:
        """The requests of a client."""
        return [request for request in self._key_to_request.values() if request.client == client]

    def choices(self) -> set[Sequence]:
        """All choices that have not ended."""
        return {seq for _, seq in self._choices.values()}

    def is_taken(self, client: int, handle: RequestHandle, n: int) -> bool:
        """Whether any of `n` handles from `handle` on is in use."""
        if (client, handle) in self._requests:
            return True
        return any((client, choice) in self._choices for choice in range(handle, handle + n))

    def add(self, request: Request) -> None:
        """Add a request with at least one choice; its `key` and handles must be unused."""
        handle = (request.client, request.handle)
        self._requests[handle] = self._key_to_request[request.key] = request
        self.loads.add_bytes(request.tenant, request.num_prompt_logprob_bytes)
        for seq in request.choices:
            self._choices[request.client, seq.handle] = (request, seq)
            self.loads.add(seq)
        if request.deadline is not None:
            self._deadlines.add(handle, request.deadline)

    def remove(self, request: Request) -> list[Sequence]:
        """Returns its choices that have not ended."""
        choices, request.choices = request.choices, []
        for seq in choices:
            del self._choices[request.client, seq.handle]
            self.loads.remove(seq)
        self._forget(request)
        return choices

    def remove_choice(self, client: int, handle: RequestHandle) -> Sequence | None:
        """Remove a choice, and its request with the last one; returns None if unknown."""
        entry = self._choices.pop((client, handle), None)
        if entry is None:
            return None
        request, seq = entry
        request.choices.remove(seq)
        self.loads.remove(seq)
        if not request.choices:
            self._forget(request)
        return seq

    def passed(self, now: float) -> list[Request]:
        """The requests past their deadlines, the earliest first; each is returned only once."""
        return [self._requests[handle] for handle in self._deadlines.pop_passed(now)]

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        requests = list(self._requests.values())
        assert {request.key: request for request in requests} == self._key_to_request, "the requests' keys"
        choices = {(request.client, seq.handle): (request, seq) for request in requests for seq in request.choices}
        assert choices == self._choices, "choices"
        assert all(request.choices for request in requests), "a request without a choice"
        self.loads.check_integrity(
            self.choices(), [(request.tenant, request.num_prompt_logprob_bytes) for request in requests]
        )
        assert len(self._deadlines) == sum(request.deadline is not None for request in requests), "deadlines"

    def _forget(self, request: Request) -> None:
        handle = (request.client, request.handle)
        del self._requests[handle], self._key_to_request[request.key]
        self._deadlines.discard(handle)
        self.loads.add_bytes(request.tenant, -request.num_prompt_logprob_bytes)
