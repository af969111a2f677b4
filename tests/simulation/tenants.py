"""The tenants of a cell's requests. They are drawn apart, so that seeds keep their workloads."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

from shared.tenants.tenant import DEFAULT_TENANT, Tenant
from tests.simulation.faults import Fault

# Kinds under which there may be several tenants: their ids meet, or their limits are reached.
_KINDS = frozenset({Fault.SAME_ID, Fault.QUEUE_FULL})


class TenantDraw:
    """Draws the tenant of one request after the other: of two or three, or always the default one.

    In some runs most requests are those of one tenant, beside which the others ask for less than their shares.
    """

    def __init__(self, seed: int, kinds: Collection[Fault]) -> None:
        self._rng = rng = Random(f"the tenants of {seed}")
        self._tenants = [DEFAULT_TENANT]
        self._chances = [1]
        if _KINDS.intersection(kinds) and rng.random() < 0.6:
            has_limits = Fault.QUEUE_FULL in kinds
            named = [_draw_tenant(name, rng, has_limits=has_limits) for name in ("a", "b")]
            self._tenants = [*named, *rng.choice([[], [DEFAULT_TENANT]])]
            self._chances = [rng.choice([1, 8]), *[1] * (len(self._tenants) - 1)]

    def draw(self) -> Tenant:
        """Draw the tenant of the next request."""
        (tenant,) = self._rng.choices(self._tenants, self._chances)
        return tenant


def _draw_tenant(name: str, rng: Random, *, has_limits: bool) -> Tenant:
    max_in_flight, max_waiting_tokens = rng.choice([None, 1, 4, 9]), rng.choice([None, 1, 60, 200])
    weight = rng.choice([0.5, 1.0, 4.0])
    if not has_limits:
        return Tenant(name, weight)
    # Drawn last, so that seeds keep the other limits.
    max_waiting_requests = rng.choice([None, None, 1, 3])
    return Tenant(name, weight, max_in_flight, max_waiting_tokens, max_waiting_requests)
