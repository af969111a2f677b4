"""How much of a cell each tenant takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from services.scheduler.core.batch.sequence import Sequence
from shared.tenant import Tenant


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


class TenantLoads:
    """Counts what each tenant has in the cell, over all clients and ranks.

    Invariant: a tenant is here while it has a choice in flight. A choice waits from its start until it is admitted or
    ends, and has `on_admission` set as long; one that waits as a later attempt was admitted before.
    """

    def __init__(self) -> None:
        self._loads: dict[str, TenantLoad] = {}

    def all(self) -> dict[str, TenantLoad]:
        """By the tenant's name."""
        return dict(self._loads)

    def find_exceeded(self, tenant: Tenant, num_choices: int, num_prompt_tokens: int) -> TenantLimit | None:
        """The limit that a newcomer would exceed; None if there is room.

        A prompt above the limit by itself is accepted while none of the tenant's waits.
        """
        load = self._loads.get(tenant.name)
        if load is None:
            return None
        max_in_flight, max_tokens = tenant.max_in_flight, tenant.max_waiting_tokens
        if max_in_flight is not None and load.num_in_flight + num_choices > max_in_flight:
            return TenantLimit("max_in_flight", max_in_flight)
        if max_tokens is not None and load.num_waiting and load.num_waiting_tokens + num_prompt_tokens > max_tokens:
            return TenantLimit("max_waiting_tokens", max_tokens)
        return None

    def add(self, seq: Sequence) -> None:
        """Count a choice that is about to be queued."""
        load = self._loads.setdefault(seq.tenant.name, TenantLoad())
        load.num_in_flight += 1
        if not seq.was_admitted:
            load.num_waiting += 1
            load.num_waiting_tokens += seq.num_limited_tokens
            seq.on_admission = self._end_wait

    def remove(self, seq: Sequence) -> None:
        """Count a choice no longer, which has ended or is about to."""
        if seq.on_admission is not None:
            self._end_wait(seq)
        load = self._loads[seq.tenant.name]
        load.num_in_flight -= 1
        if not load.num_in_flight:
            del self._loads[seq.tenant.name]

    def check_integrity(self, choices: Iterable[Sequence]) -> None:
        """Assert the class's invariant; `choices` are those that have not ended."""
        loads: dict[str, TenantLoad] = {}
        for seq in choices:
            load = loads.setdefault(seq.tenant.name, TenantLoad())
            load.num_in_flight += 1
            assert (seq.on_admission is None) == seq.was_admitted, "a choice that waits for its admission"
            if not seq.was_admitted:
                load.num_waiting += 1
                load.num_waiting_tokens += seq.num_limited_tokens
        assert loads == self._loads, "the tenants' loads"

    def _end_wait(self, seq: Sequence) -> None:
        seq.on_admission = None
        load = self._loads[seq.tenant.name]
        load.num_waiting -= 1
        load.num_waiting_tokens -= seq.num_limited_tokens
