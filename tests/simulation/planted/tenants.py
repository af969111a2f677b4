"""Bugs between tenants that the simulation must detect."""

from __future__ import annotations

from collections.abc import Iterator

from services.scheduler.cell.events import Submission
from services.scheduler.cell.requests.request_manager import RequestManager
from services.scheduler.cell.requests.requests import Request
from services.scheduler.cell.requests.tenant_loads import TenantLimit, TenantLoad, TenantLoads
from services.scheduler.core.batch.sequence import RequestKey, Sequence
from services.scheduler.core.planning.shares import Shares
from services.scheduler.core.queue.tenant_counters import TenantAccount, TenantCounters
from shared.tenants.tenant import DEFAULT_TENANT, Tenant
from tests.simulation.faults import Fault
from tests.simulation.planted.planting import Patch, PlantedBug, planter

TENANT_BUGS: list[PlantedBug] = []
_planted = planter(TENANT_BUGS)


@_planted(Fault.SAME_ID, seed=24)
def _ids_are_those_of_all_tenants(patch: Patch) -> None:
    """A request is refused as a duplicate of another tenant's."""
    patch.setattr(Submission, "key", property(lambda self: RequestKey(DEFAULT_TENANT.name, self.request_id)))


@_planted(Fault.SAME_ID, seed=3)
def _tenants_share_prefixes(patch: Patch) -> None:
    """A tenant finds the prefixes of another's requests."""
    patch.setattr("services.scheduler.cell.requests.intake.salt_of", lambda _, client_salt: client_salt)


@_planted(Fault.SAME_ID, seed=4)
def _credit_is_saved(patch: Patch) -> None:
    """A tenant that begins to wait keeps the counter that it had."""
    begin_to_wait = TenantCounters.begin_to_wait

    def begin(self: TenantCounters, account: TenantAccount) -> None:
        counter = account.counter
        begin_to_wait(self, account)
        account.counter = counter

    patch.setattr(TenantCounters, "begin_to_wait", begin)


@_planted(Fault.SAME_ID, seed=46)
def _nobody_makes_way(patch: Patch) -> None:
    """A tenant within its share waits until the sequences of others end."""
    patch.setattr(Shares, "victims_for", lambda *_, **__: iter(()))


@_planted(Fault.SAME_ID, seed=3)
def _victims_are_below_their_share(patch: Patch) -> None:
    """Whoever entered last makes way, whatever its tenant holds."""

    def victims_for(self: Shares, seq: Sequence, **_: bool) -> Iterator[Sequence]:
        return (victim for victim in reversed(self._running.sequences()) if victim.tenant_number != seq.tenant_number)

    patch.setattr(Shares, "victims_for", victims_for)


@_planted(Fault.SAME_ID, seed=45)
def _room_is_given_back(patch: Patch) -> None:
    """What made way goes before what it made way for, although its tenant is above its share."""
    patch.setattr(Shares, "keeps_share", lambda *_: True)


@_planted(Fault.QUEUE_FULL, seed=3)
def _choices_count_once(patch: Patch) -> None:
    """A request counts once against its tenant's limit, however many choices it has."""
    find = TenantLoads.find_exceeded

    def find_for_one(self: TenantLoads, tenant: Tenant, num_choices: int, num_prompt_tokens: int) -> TenantLimit | None:
        return find(self, tenant, min(1, num_choices), num_prompt_tokens)

    patch.setattr(TenantLoads, "find_exceeded", find_for_one)


@_planted(Fault.QUEUE_FULL, seed=8)
def _no_prompt_waits(patch: Patch) -> None:
    """Prompts that wait do not count against their tenant's limit."""
    find = TenantLoads.find_exceeded
    patch.setattr(
        TenantLoads, "find_exceeded", lambda self, tenant, num_choices, _: find(self, tenant, num_choices, -(10**9))
    )


@_planted(Fault.QUEUE_FULL)
def _the_queue_is_one_for_all(patch: Patch) -> None:
    """A tenant is refused for what others have waiting."""

    def load_of_all(self: TenantLoads, _: Tenant) -> TenantLoad:
        loads = self.all().values()
        return TenantLoad(
            num_waiting=sum(load.num_waiting for load in loads),
            num_waiting_tokens=sum(load.num_waiting_tokens for load in loads),
        )

    patch.setattr(TenantLoads, "load_of", load_of_all)


@_planted(Fault.QUEUE_FULL)
def _tenants_fill_the_room_of_all(patch: Patch) -> None:
    """A tenant may have as much waiting as its limit says, whatever that leaves free for others."""
    patch.setattr("services.scheduler.cell.requests.tenant_loads.limit_of_party", lambda limit, **_: limit)


@_planted(Fault.QUEUE_FULL, Fault.STREAM_BREAK)
def _later_attempts_are_limited(patch: Patch) -> None:
    """A request that was accepted is refused when it is submitted again."""
    check_room = RequestManager._check_room

    def check_always(self: RequestManager, request: Request, now: float) -> None:
        if request.attempt > 1 and request.choices:
            self._check_tenant(request, now)
        check_room(self, request, now)

    patch.setattr(RequestManager, "_check_room", check_always)
