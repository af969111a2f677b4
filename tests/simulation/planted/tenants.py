"""Bugs between tenants that the simulation must detect."""

from __future__ import annotations

from services.scheduler.cell.events import Submission
from services.scheduler.cell.requests.request_manager import RequestManager
from services.scheduler.cell.requests.requests import Request
from services.scheduler.cell.requests.tenant_loads import TenantLimit, TenantLoads
from services.scheduler.core.batch.sequence import RequestKey
from shared.tenant import DEFAULT_TENANT, Tenant
from tests.simulation.faults import Fault
from tests.simulation.planted.planting import Patch, PlantedBug, planter

TENANT_BUGS: list[PlantedBug] = []
_planted = planter(TENANT_BUGS)


@_planted(Fault.SAME_ID, seed=3)
def _ids_are_those_of_all_tenants(patch: Patch) -> None:
    """A request is refused as a duplicate of another tenant's."""
    patch.setattr(Submission, "key", property(lambda self: RequestKey(DEFAULT_TENANT.name, self.request_id)))


@_planted(Fault.SAME_ID, seed=3)
def _tenants_share_prefixes(patch: Patch) -> None:
    """A tenant finds the prefixes of another's requests."""
    patch.setattr("services.scheduler.cell.requests.intake.salt_of", lambda _, client_salt: client_salt)


@_planted(Fault.QUEUE_FULL)
def _choices_count_once(patch: Patch) -> None:
    """A request counts once against its tenant's limit, however many choices it has."""
    find = TenantLoads.find_exceeded

    def find_for_one(self: TenantLoads, tenant: Tenant, num_choices: int, num_prompt_tokens: int) -> TenantLimit | None:
        return find(self, tenant, min(1, num_choices), num_prompt_tokens)

    patch.setattr(TenantLoads, "find_exceeded", find_for_one)


@_planted(Fault.QUEUE_FULL)
def _no_prompt_waits(patch: Patch) -> None:
    """Prompts that wait do not count against their tenant's limit."""
    find = TenantLoads.find_exceeded
    patch.setattr(
        TenantLoads, "find_exceeded", lambda self, tenant, num_choices, _: find(self, tenant, num_choices, -(10**9))
    )


@_planted(Fault.QUEUE_FULL, Fault.STREAM_BREAK)
def _later_attempts_are_limited(patch: Patch) -> None:
    """A request that was accepted is refused when it is submitted again."""
    check_room = RequestManager._check_room

    def check_always(self: RequestManager, request: Request, now: float) -> None:
        if request.attempt > 1 and request.choices:
            self._check_tenant(request, now)
        check_room(self, request, now)

    patch.setattr(RequestManager, "_check_room", check_always)
