"""Whether the slots and blocks of a rank go to the tenants that they belong to, derived independently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.scheduler.core.batch.sequence import Priority
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from shared.tenants.tenant import Tenant
from tests.simulation.workload import CellSettings

CounterOf = Callable[[Tenant], float]
"""The counter that an engine keeps of a tenant."""


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """What a sequence holds, or needs."""

    tenant: Tenant
    priority: Priority
    num_blocks: int
    """With those that it shares."""
    blocks: frozenset[int] = frozenset()
    """Empty while it waits."""
    is_new: bool = False
    """Whether it waits to be admitted for the first time."""
    has_token: bool = False
    """Whether it has got a token since it entered."""


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank at one step."""

    running: Sequence[Claim]
    """Sequences in order of entry, without those that have ended or for whose last token steps are in flight."""
    others: Sequence[Claim]
    """Sequences that hold slots too, until steps in flight have returned."""
    waiting: Sequence[Claim]
    num_later_tokens: int
    """Prompt tokens that are still to be sent of those that have entered."""


@dataclass(slots=True)
class _Wait:
    """How long a tenant has waited for what is its own."""

    tenant: Tenant | None = None
    num_steps: int = 0
    most_steps: int = 0


class ShareWatch:
    """Follows who waits for room, and who makes way, on a rank of a cell without classes.

    1. A tenant loses a running sequence only if it holds its share without it, in slots or in blocks; or if it holds
       the most blocks by its weight, when a sequence that grows finds none.
    2. While the tenant with the lowest counter of those that wait is within its share with each of its sequences, and
       tenants above theirs with higher counters hold the room, one of its sequences enters: after the `F` steps in
       flight for which those that make way keep their blocks, and the steps that compute the rest of another prompt.
       Each sequence that makes way with a later step costs `F` steps more.
    3. If those that hold the room must get a token before they make way (again), this takes `F` steps and those of
       their prompts besides, but no longer.

    One that enters and leaves its tenant within its share went first rightly, and the counts start again. Where prompts
    are delayed, for others or for other ranks, only the first rule is checked.
    """

    def __init__(self, settings: CellSettings, rank: int, num_blocks: int, counter_of: CounterOf) -> None:
        policy = settings.policy
        self._settings = settings
        self._counter_of = counter_of
        self._num_blocks = num_blocks
        self._num_budget_tokens = settings.max_prompt_tokens(rank)
        self._is_delayed = bool(policy.delay_factor) or settings.topology.is_coupled
        self._wait, self._long_wait = _Wait(), _Wait()

    @staticmethod
    def is_for(settings: CellSettings) -> bool:
        """Whether the rules hold in such a cell."""
        return settings.policy.queue_policy is not QueuePolicy.PRIORITY

    def check_victims(self, before: RankView, victims: Sequence[Claim]) -> None:
        """Check who made way with a step; `before` has the victims running."""
        slots, blocks = _held(before.running)
        shares = self._shares(before)
        for victim in victims:
            slots[victim.tenant] -= 1
            blocks[victim.tenant] -= victim.num_blocks
        for victim in victims:
            tenant = victim.tenant
            slot_share, block_share = shares[tenant]
            if slots[tenant] >= slot_share or blocks[tenant] >= block_share:
                continue
            # It may have grown by a block per row with this step.
            most = sum(claim.num_blocks + 1 for claim in before.running if claim.tenant == tenant) / tenant.weight
            is_furthest = all(most >= blocks[other] / other.weight for other in blocks)
            assert is_furthest, "a tenant makes way although it is not above its share"

    def check_wait(self, after: RankView, entered: Sequence[Claim], num_victims: int) -> None:
        """Check how long a tenant has waited for what is its own; `after` is the rank with a step's entries."""
        if self._is_delayed:
            return
        slots, blocks = _held(after.running)
        shares = self._shares(after)
        # One that has entered and does not run any more has all its tokens coming.
        is_right = any(
            claim.tenant not in shares
            or (slots[claim.tenant] <= shares[claim.tenant][0] and blocks[claim.tenant] <= shares[claim.tenant][1])
            for claim in entered
        )
        num_in_flight = self._settings.policy.max_steps_in_flight
        num_steps = num_in_flight + -(-after.num_later_tokens // self._num_budget_tokens) + 1
        num_chunks = -(-self._settings.max_request_tokens // self._num_budget_tokens)
        num_long_steps = 2 * (num_chunks + num_in_flight + 1)
        for wait, most_steps, needs_token in (
            (self._wait, num_steps, True),
            (self._long_wait, num_long_steps, False),
        ):
            tenant = self._find_wronged(after, needs_token=needs_token)
            if tenant is None or tenant != wait.tenant or is_right:
                wait.tenant, wait.num_steps, wait.most_steps = tenant, 0, most_steps
                continue
            wait.num_steps += 1
            wait.most_steps += num_victims * num_in_flight
            assert wait.num_steps <= wait.most_steps, "a tenant within its share waits for room above another's"

    def _find_wronged(self, view: RankView, *, needs_token: bool) -> Tenant | None:
        """The tenant that waits for what is its own, if any.

        Args:
            needs_token: Whether those that hold the room must have got a token since they entered.
        """
        tenants = {claim.tenant for claim in view.waiting}
        if not tenants:
            return None
        tenant = min(tenants, key=lambda one: (self._counter_of(one), one.name))
        own = [claim for claim in view.waiting if claim.tenant == tenant]
        slots, blocks = _held(view.running)
        shares = self._shares(view)

        def fits(claim: Claim) -> bool:
            slot_share, block_share = shares[claim.tenant]
            return slots[claim.tenant] + 1 <= slot_share and blocks[claim.tenant] + claim.num_blocks <= block_share

        if any(fits(claim) for claim in view.waiting if not claim.is_new) or not all(map(fits, own)):
            # Those that return and keep their tenant within its share go first.
            return None
        need = max(claim.num_blocks for claim in own)
        held = [*view.running, *view.others]
        num_slots = 1 + len(held) - self._settings.max_num_seqs
        num_blocks = need + len(frozenset[int]().union(*(one.blocks for one in held))) - self._num_blocks
        lacks_slot, lacks_blocks = num_slots > 0, num_blocks > 0
        if not (lacks_slot or lacks_blocks):
            return None
        uses = Counter(block for one in held for block in one.blocks)
        least_urgent = max(claim.priority for claim in own)
        for victim in reversed(view.running):
            if num_slots <= 0 and num_blocks <= 0:
                break
            other = victim.tenant
            if needs_token and not victim.has_token:
                continue
            if other == tenant or victim.priority < least_urgent or self._counter_of(other) < self._counter_of(tenant):
                continue
            has_slots = slots[other] - 1 >= shares[other][0]
            has_blocks = blocks[other] - victim.num_blocks >= shares[other][1]
            if (lacks_slot and has_slots) or (lacks_blocks and has_blocks):
                slots[other] -= 1
                blocks[other] -= victim.num_blocks
                num_slots -= 1
                num_blocks -= sum(uses[block] == 1 for block in victim.blocks)
        return tenant if num_slots <= 0 and num_blocks <= 0 else None

    def _shares(self, view: RankView) -> dict[Tenant, tuple[float, float]]:
        """The slots and blocks that belong to each tenant."""
        tenants = {claim.tenant for claim in (*view.running, *view.waiting)}
        total = sum(tenant.weight for tenant in tenants)
        num_slots, num_blocks = self._settings.max_num_seqs, self._num_blocks
        return {one: (max(1.0, num_slots * one.weight / total), num_blocks * one.weight / total) for one in tenants}


def _held(claims: Sequence[Claim]) -> tuple[Counter[Tenant], Counter[Tenant]]:
    """Slots and blocks by tenant."""
    slots, blocks = Counter[Tenant](), Counter[Tenant]()
    for claim in claims:
        slots[claim.tenant] += 1
        blocks[claim.tenant] += claim.num_blocks
    return slots, blocks
