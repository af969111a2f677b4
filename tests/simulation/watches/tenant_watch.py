"""Which newcomers an engine must refuse for the limits of their tenants or of all, derived independently."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from services.scheduler.core.policy import SchedulerPolicy
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
    if tenant.max_waiting_requests is not None and waiting and len(waiting) + plan.n > tenant.max_waiting_requests:
        return "TENANT_LIMIT"
    num_tokens = sum(len(entry.plan.prompt) for entry in waiting if not entry.choice) + len(plan.prompt)
    is_long = tenant.max_waiting_tokens is not None and num_tokens > tenant.max_waiting_tokens
    return "TENANT_LIMIT" if waiting and is_long else None


def is_queue_full(policy: SchedulerPolicy, plan: RequestPlan, live: Collection[Entry]) -> bool:
    """Whether a first attempt must be refused for the limits of the policy: no tenant may take what others need.

    Of one tenant at most `max_waiting_requests` wait, and at most four times what it leaves free of what all may have;
    one of which nothing waits is refused only if all of that is taken. Log-probabilities likewise.
    """
    num_waiting: dict[str, int] = {}
    requests: dict[str, dict[object, int]] = {}
    for entry in live:
        num_waiting[entry.plan.tenant.name] = num_waiting.get(entry.plan.tenant.name, 0) + entry.is_new
        requests.setdefault(entry.plan.tenant.name, {})[entry.request_key] = entry.num_prompt_logprob_bytes
    limit, name = policy.max_waiting_requests, plan.tenant.name
    num_own, num_all = num_waiting.get(name, 0), sum(min(limit, number) for number in num_waiting.values())
    num_free = policy.num_full_tenants * limit - num_all
    if num_own and (num_own + plan.n > limit or num_own + plan.n > 4 * (num_free - plan.n)):
        return True
    if not num_own and num_free <= 0:
        return True
    num_new = plan.num_prompt_logprob_bytes
    num_bytes = {tenant: sum(each.values()) for tenant, each in requests.items()}
    num_own, num_free = num_bytes.get(name, 0), 2 * policy.max_prompt_logprob_bytes - sum(num_bytes.values())
    if not num_new:
        return False
    if not num_own:
        return num_new > num_free
    return num_own + num_new > min(policy.max_prompt_logprob_bytes, 4 * (num_free - num_new))


def check_tenants(live: Iterable[Entry]) -> None:
    """Check that no tenant has more newcomers in flight than it may."""
    num_in_flight: dict[str, int] = {}
    for entry in live:
        tenant = entry.plan.tenant
        if tenant.max_in_flight is not None and entry.attempt == 1:
            num_in_flight[tenant.name] = num_in_flight.get(tenant.name, 0) + 1
            assert num_in_flight[tenant.name] <= tenant.max_in_flight, "a tenant has more in flight than it may"
