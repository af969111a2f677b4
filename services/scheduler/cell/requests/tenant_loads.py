"""How much of a cell each tenant takes, and whether there is room for more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.policy import SchedulerPolicy
from shared.tenants.fair_room import limit_of_party
from shared.tenants.tenant import Tenant

# Log-probabilities are large: all tenants together may have so many times what one may.
_MAX_SHARES_OF_BYTES = 2


class TenantLimit(NamedTuple):
    """One of a tenant's limits, by its name in `Tenant`."""

    name: str
    value: int


@dataclass(slots=True)
class TenantLoad:
    """What a tenant has in the cell."""

    num_in_flight: int = 0
    """Choices that have not ended."""
    num_waiting: int = 0
    """Choices in flight that were never admitted."""
    num_waiting_tokens: int = 0
    """The prompt tokens of the leaders among these."""


_NO_LOAD = TenantLoad()


class TenantLoads:
    """Counts what each tenant has in the cell, over all clients and ranks.

    The policy's limits are each tenant's. All tenants share a room in which several times as much may wait, and that
    no tenant can fill: of what one has beyond its limits, because it was accepted without them, nothing counts there.

    Invariant: a tenant is here while it has a choice in flight. A choice waits from its start until it is admitted or
    ends, and has `on_admission` set as long; one that waits as a later attempt was admitted before. `_num_waiting` and
    `_num_waiting_tokens` are the sums of what waits of each tenant, or of the policy's limits where these are lower.
    """

    def __init__(self, policy: SchedulerPolicy) -> None:
        self._policy = policy
        self._loads: dict[str, TenantLoad] = {}
        self._num_waiting = 0
        self._num_waiting_tokens = 0
        # The bytes of tenants that have any, by name.
        self._num_bytes: dict[str, int] = {}

    def all(self) -> dict[str, TenantLoad]:
        """The loads, by the tenant's name."""
        return dict(self._loads)

    def load_of(self, tenant: Tenant) -> TenantLoad:
        """A tenant's load, which must not be modified."""
        return self._loads.get(tenant.name, _NO_LOAD)

    def num_bytes_of(self, tenant: Tenant) -> int:
        """The bytes of prompt log-probabilities that a tenant's requests may have."""
        return self._num_bytes.get(tenant.name, 0)

    def find_exceeded(self, tenant: Tenant, num_choices: int, num_prompt_tokens: int) -> TenantLimit | None:
        """The limit that a newcomer would exceed; None if there is room.

        A prompt above the limit by itself is accepted while none of the tenant's waits.
        """
        load = self._loads.get(tenant.name)
        if load is None:
            return None
        max_in_flight = tenant.max_in_flight
        if max_in_flight is not None and load.num_in_flight + num_choices > max_in_flight:
            return TenantLimit("max_in_flight", max_in_flight)
        max_requests, max_tokens = tenant.max_waiting_requests, tenant.max_waiting_tokens
        if max_requests is not None and load.num_waiting and load.num_waiting + num_choices > max_requests:
            return TenantLimit("max_waiting_requests", max_requests)
        if max_tokens is not None and load.num_waiting and load.num_waiting_tokens + num_prompt_tokens > max_tokens:
            return TenantLimit("max_waiting_tokens", max_tokens)
        return None

    def count_missing(self, tenant: Tenant, num_choices: int, num_prompt_tokens: int) -> int:
        """How many of those that wait must leave before a tenant's newcomer has room by the policy; 0 if it has.

        One above a limit by itself is accepted while none of the tenant's waits, and there is any room.
        """
        load, num_tenants = self.load_of(tenant), self._policy.num_full_tenants
        limit, max_tokens = self._policy.max_waiting_requests, self._policy.max_waiting_tokens
        capacity, token_capacity = num_tenants * limit, num_tenants * max_tokens
        if not load.num_waiting:
            return int(self._num_waiting >= capacity or self._num_waiting_tokens >= token_capacity)
        most = limit_of_party(limit, capacity=capacity, num_taken=self._num_waiting + num_choices)
        if (num_missing := load.num_waiting + num_choices - most) > 0:
            return num_missing
        num_taken = self._num_waiting_tokens + num_prompt_tokens
        most_tokens = limit_of_party(max_tokens, capacity=token_capacity, num_taken=num_taken)
        return int(load.num_waiting_tokens + num_prompt_tokens > most_tokens)

    def has_room_for_bytes(self, tenant: Tenant, num_bytes: int) -> bool:
        """Whether a tenant's newcomer may have so many bytes of prompt log-probabilities, at most the policy's limit.

        That of a tenant that has none needs room for them alone.
        """
        limit, num_taken = self._policy.max_prompt_logprob_bytes, sum(self._num_bytes.values())
        capacity, num_own = _MAX_SHARES_OF_BYTES * limit, self.num_bytes_of(tenant)
        if not num_own:
            return num_taken + num_bytes <= capacity
        return num_own + num_bytes <= limit_of_party(limit, capacity=capacity, num_taken=num_taken + num_bytes)

    def add_bytes(self, tenant: Tenant, num_bytes: int) -> None:
        """Count bytes of a request's prompt log-probabilities, or fewer if negative."""
        if not num_bytes:
            return
        num_own = self.num_bytes_of(tenant) + num_bytes
        if num_own:
            self._num_bytes[tenant.name] = num_own
        else:
            del self._num_bytes[tenant.name]

    def add(self, seq: Sequence) -> None:
        """Count a choice that is about to be queued."""
        load = self._loads.setdefault(seq.tenant.name, TenantLoad())
        load.num_in_flight += 1
        if not seq.was_admitted:
            self._change_waiting(load, 1, seq.num_limited_tokens)
            seq.on_admission = self._end_wait

    def remove(self, seq: Sequence) -> None:
        """Count a choice no longer, which has ended or is about to."""
        if seq.on_admission is not None:
            self._end_wait(seq)
        load = self._loads[seq.tenant.name]
        load.num_in_flight -= 1
        if not load.num_in_flight:
            del self._loads[seq.tenant.name]

    def check_integrity(self, choices: Iterable[Sequence], num_bytes: Iterable[tuple[Tenant, int]]) -> None:
        """Assert the class's invariant; `choices` are those that have not ended, `num_bytes` each request's."""
        loads: dict[str, TenantLoad] = {}
        for seq in choices:
            load = loads.setdefault(seq.tenant.name, TenantLoad())
            load.num_in_flight += 1
            assert (seq.on_admission is None) == seq.was_admitted, "a choice that waits for its admission"
            if not seq.was_admitted:
                load.num_waiting += 1
                load.num_waiting_tokens += seq.num_limited_tokens
        assert loads == self._loads, "the tenants' loads"
        most, most_tokens = self._policy.max_waiting_requests, self._policy.max_waiting_tokens
        assert (self._num_waiting, self._num_waiting_tokens) == (
            sum(min(load.num_waiting, most) for load in loads.values()),
            sum(min(load.num_waiting_tokens, most_tokens) for load in loads.values()),
        ), "what waits of all tenants"
        num_own: dict[str, int] = {}
        for tenant, number in num_bytes:
            if number:
                num_own[tenant.name] = num_own.get(tenant.name, 0) + number
        assert num_own == self._num_bytes, "bytes of prompt log-probabilities"

    def _end_wait(self, seq: Sequence) -> None:
        seq.on_admission = None
        self._change_waiting(self._loads[seq.tenant.name], -1, -seq.num_limited_tokens)

    def _change_waiting(self, load: TenantLoad, num_choices: int, num_tokens: int) -> None:
        most, most_tokens = self._policy.max_waiting_requests, self._policy.max_waiting_tokens
        self._num_waiting -= min(load.num_waiting, most)
        self._num_waiting_tokens -= min(load.num_waiting_tokens, most_tokens)
        load.num_waiting += num_choices
        load.num_waiting_tokens += num_tokens
        self._num_waiting += min(load.num_waiting, most)
        self._num_waiting_tokens += min(load.num_waiting_tokens, most_tokens)
