"""Whether tenants that wait are given alike, in a cell of one rank without classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from services.scheduler.core.queue.tenant_counters import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST, TenantAccount
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from shared.tenants.tenant import Tenant
from tests.simulation.watches.epoch_watch import Entry
from tests.simulation.workload import CellSettings

# For the sums of many fractions.
_EPSILON = 1e-6


@dataclass(slots=True)
class _Seen:
    """What is known of one tenant."""

    tenant: Tenant
    admitted: set[Entry] = field(default_factory=set)
    """Its choices that were admitted, here or in an earlier attempt, and have not ended."""
    most_coming: float = 0.0
    """What those admitted at its last choice by counter could still cost, and what came since."""
    bound: float = 0.0


@dataclass(slots=True)
class _Wait:
    """A choice that waits, and what held when this began to be watched."""

    counter: float
    coming: dict[str, float]
    """By tenant: the cost of the output of what was admitted."""
    own_bound: float = 0.0
    """The highest since."""
    bounds: dict[str, float] = field(default_factory=dict)
    """The highest since, by tenant."""


class CounterWatch:
    """Follows the counters of an engine's tenants.

    Let `v` be the lowest counter of the tenants that wait, and `R` the cost by weight of the output that a tenant's
    admitted choices may get, and of what was not sent of their prompts. The rules of the paper's theorem hold for
    `F = c - v + R`:

    - `v` does not fall: counters only rise, and a tenant that begins to wait is lifted to `v`, or while none waits to
      the counter of the last one that did.
    - Prompts and output move cost from `R` to `c`; an end lowers `R`. So `F` rises only when a choice is admitted.
    - A newcomer is admitted after its tenant was chosen, when `c = v` and `F = R`. So after the admission, `F` is at
      most that `R` plus the newcomer's prompt and output; and that `R` is at most what it was after the tenant's
      admission before.
    - A choice that was admitted before enters without being chosen, if its tenant stays within its share. Its output
      joins `R` if another engine had admitted it, and it may pay for its tokens once more.

    While a tenant waits, `c - v <= F`, so two of them are at most one bound apart. With one prompt length and a pool of
    `M` tokens which no choice leaves before its end, this is the paper's `2 max(w_p L, w_q M)`; here preempted choices
    count as well, and prompt and output add up.

    Source: Sheng et al., "Fairness in serving large language models" (OSDI '24), lemma 4.3 and theorem 4.4.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._counters: dict[str, float] = {}
        self._waits: dict[Entry, _Wait] = {}
        self._was_disturbed = False

    @staticmethod
    def is_for(settings: CellSettings) -> bool:
        """Whether the bound holds in such a cell: each rank has a queue, and classes go before counters."""
        return settings.topology.dp_size == 1 and settings.policy.queue_policy is not QueuePolicy.PRIORITY

    def check(self, accounts: Mapping[str, TenantAccount], live: Collection[Entry], *, is_disturbed: bool) -> None:
        """Check the counters after an event.

        Args:
            is_disturbed: Whether choices may have entered in another order: suspects are tried, or a rank drains.
        """
        self._counters = {name: account.counter for name, account in accounts.items()}
        self._waits = {entry: wait for entry, wait in self._waits.items() if entry.is_live}
        is_disturbed, self._was_disturbed = is_disturbed or self._was_disturbed, is_disturbed
        by_name: dict[str, list[Entry]] = {}
        for entry in live:
            by_name.setdefault(entry.plan.tenant.name, []).append(entry)
        waiting = [account.counter for account in accounts.values() if account.num_waiting]
        lowest = min(waiting, default=0.0)
        for name, account in accounts.items():
            self._follow(name, by_name.get(name, []))
            seen = self._seen.get(name)
            if seen is None:
                continue
            if is_disturbed or not waiting:
                most = account.counter - lowest + _coming_cost(seen.admitted) / account.weight
                seen.bound = max(seen.bound, most)
            elif account.num_waiting:
                # How much of the prompts was sent is not known here.
                excess = account.counter - lowest + _output_cost(seen.admitted) / account.weight
                assert excess <= seen.bound + _EPSILON, "a tenant that waits is far ahead of another one"

    def note_return(self, entry: Entry) -> None:
        """Note that a choice that was admitted before enters a batch again, for which its tenant may pay."""
        seen = self._seen.get(entry.plan.tenant.name)
        if seen is not None:
            seen.most_coming += _recomputation_cost(entry)
            seen.bound += _recomputation_cost(entry) / seen.tenant.weight

    def most_tokens_of_others(self, entry: Entry) -> float:
        """The most output tokens that other tenants can have got since the first call for a choice that waits.

        Let the counter `c` of its tenant, which waits all the time, have risen by `d` since. When another tenant began
        to wait, its counter was at least the first `v`, which was at least the first `c` less the bound of the tenant.
        Now it is at most `v` plus its own bound, and `v` is at most `c`. So it was charged at most `d` and both bounds,
        by its weight, while it waited. What it had been admitted before may have ended besides.
        """
        name, counters = entry.plan.tenant.name, self._counters
        if entry not in self._waits:
            coming = {other: _output_cost(seen.admitted) for other, seen in self._seen.items()}
            self._waits[entry] = _Wait(counters.get(name, 0.0), coming)
        wait, own = self._waits[entry], self._seen.get(name)
        rise = counters.get(name, 0.0) - wait.counter
        wait.own_bound = max(wait.own_bound, own.bound if own is not None else 0.0)
        cost = 0.0
        for other, seen in self._seen.items():
            if other != name:
                wait.bounds[other] = max(wait.bounds.get(other, 0.0), seen.bound)
                cost += wait.coming.get(other, 0.0) + seen.tenant.weight * (rise + wait.own_bound + wait.bounds[other])
        return cost / OUTPUT_TOKEN_COST

    def _follow(self, name: str, live: list[Entry]) -> None:
        """Take in who was admitted, returned or ended."""
        if name not in self._seen:
            if not live:
                return
            self._seen[name] = _Seen(live[0].plan.tenant)
        seen = self._seen[name]
        admitted = {entry for entry in live if not entry.is_new}
        came = admitted - seen.admitted
        newcomers = {entry for entry in came if entry.attempt == 1}
        weight = seen.tenant.weight
        if newcomers:
            cost = sum(PROMPT_TOKEN_COST * len(entry.plan.prompt) for entry in newcomers) + _max_output_cost(newcomers)
            seen.bound = (seen.most_coming + cost) / weight
            seen.most_coming = _coming_cost(admitted)
        returned = came - newcomers
        cost = sum(map(_recomputation_cost, returned)) + _output_cost(returned)
        seen.most_coming += cost
        seen.bound += cost / weight
        seen.admitted = admitted


def _output_cost(entries: Collection[Entry]) -> float:
    """The cost of the output that choices may still get."""
    return OUTPUT_TOKEN_COST * sum(entry.plan.params.max_tokens - entry.num_tokens for entry in entries)


def _coming_cost(entries: Collection[Entry]) -> float:
    """The most that choices may still cost: their output, and the prompts of those that have no token yet."""
    unsent = sum(len(entry.plan.prompt) for entry in entries if not entry.num_tokens)
    return _output_cost(entries) + PROMPT_TOKEN_COST * unsent


def _recomputation_cost(entry: Entry) -> float:
    """The most that a choice pays when it enters again."""
    return PROMPT_TOKEN_COST * (len(entry.plan.prompt) + entry.num_tokens)


def _max_output_cost(entries: Collection[Entry]) -> float:
    return OUTPUT_TOKEN_COST * sum(entry.plan.params.max_tokens for entry in entries)
