"""Which newcomers an engine must refuse for the limits of their tenants, derived independently."""

from __future__ import annotations

from collections.abc import Iterable

from tests.simulation.watches.epoch_watch import Entry
from tests.simulation.workload import RequestPlan


def find_tenant_refusal(plan: RequestPlan, live: Iterable[Entry]) -> str | None:
    """The reason for which a first attempt must be refused; None if its tenant has room for it."""
    tenant = plan.tenant
    if tenant.max_in_flight is not None and plan.n > tenant.max_in_flight:
        return "INVALID_REQUEST"
    own = [entry for entry in live if entry.plan.tenant.name == tenant.name]
    if tenant.max_in_flight is not None and len(own) + plan.n > tenant.max_in_flight:
        return "TENANT_LIMIT"
    waiting = [entry for entry in own if entry.is_new]
    num_tokens = sum(len(entry.plan.prompt) for entry in waiting if not entry.choice) + len(plan.prompt)
    is_long = tenant.max_waiting_tokens is not None and num_tokens > tenant.max_waiting_tokens
    return "TENANT_LIMIT" if waiting and is_long else None


def check_tenants(live: Iterable[Entry]) -> None:
    """Check that no tenant has more newcomers in flight than it may."""
    num_in_flight: dict[str, int] = {}
    for entry in live:
        tenant = entry.plan.tenant
        if tenant.max_in_flight is not None and entry.attempt == 1:
            num_in_flight[tenant.name] = num_in_flight.get(tenant.name, 0) + 1
            assert num_in_flight[tenant.name] <= tenant.max_in_flight, "a tenant has more in flight than it may"
