"""What has been computed for each tenant, and refused, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.scheduler.cell.requests.tenant_loads import TenantLoads
from shared.tenants.tenant import DEFAULT_TENANT

# Further tenants are counted together: each is several series of metrics.
MAX_TENANTS = 100
OTHER = "other"


@dataclass(slots=True)
class TenantTotal:
    """Totals since the process started."""

    num_refused: int = 0
    """Requests above the tenant's limits."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed until choices had their first tokens, without cached ones."""
    num_completion_tokens: int = 0
    """Completion tokens of choices that have ended; without earlier attempts."""


class TenantTotals:
    """The totals of the default tenant and those seen first, `MAX_TENANTS` by name, and of all others together."""

    def __init__(self) -> None:
        # Its series are there from the start, as counters should be.
        self._totals = {DEFAULT_TENANT.name: TenantTotal()}

    def name_of(self, tenant: str) -> str:
        """The name under which a tenant is counted."""
        is_full = len(self._totals) - (OTHER in self._totals) >= MAX_TENANTS
        return OTHER if is_full and tenant not in self._totals else tenant

    def of(self, tenant: str) -> TenantTotal:
        """The totals to which a tenant's are added."""
        total = self._totals.get(tenant)
        return self._totals.setdefault(self.name_of(tenant), TenantTotal()) if total is None else total

    def all(self) -> dict[str, TenantTotal]:
        """The totals, by name."""
        return dict(self._totals)


@dataclass(slots=True)
class TenantState:
    """What is known of a tenant, or of all others together."""

    name: str
    total: TenantTotal
    num_in_flight: int = 0
    num_waiting: int = 0
    """As in `TenantLoad`."""


def describe_tenants(loads: TenantLoads, totals: TenantTotals) -> list[TenantState]:
    """Join what tenants have in the cell and their totals; a tenant that has ever been seen stays."""
    states = {name: TenantState(name, replace(total)) for name, total in totals.all().items()}
    for tenant, load in loads.all().items():
        name = totals.name_of(tenant)
        state = states.setdefault(name, TenantState(name, TenantTotal()))
        state.num_in_flight += load.num_in_flight
        state.num_waiting += load.num_waiting
    return list(states.values())
