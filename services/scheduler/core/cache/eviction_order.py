"""Which checkpoint of a recurrent state is evicted next.

The least recently used one is, of those that were never restored first: running sequences save far more states than are
ever used again, and must not crowd out those of prompts that are shared. At most three quarters are kept so. What
cannot be reached any more goes before all others.

With several tenants, one that saves many states must not push out everybody else's. A checkpoint belongs to the tenant
for which it was saved, and the next one is taken as `free_blocks` takes cached blocks:

1. from a tenant that has saved and restored nothing while the pool was filled 8 times over;
2. else from the tenant with the most checkpoints by its weight: all others are kept up to an equal share each.

Source: segmented LRU, Karedla et al., "Caching strategies to improve disk system performance", IEEE Computer 27(3),
1994, for the order within a tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from services.scheduler.core.cache.free_blocks import MAX_TURNOVERS


@dataclass(slots=True)
class _Held:
    """The checkpoints of one tenant."""

    weight: float
    used_at: int
    """How many saves and restores had begun when it began its last one."""
    num_checkpoints: int = 0
    """Checkpoints, with those that a step is about to save."""
    once: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Checkpoints to be evicted first, the next one first; `reused` likewise."""
    reused: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def fullness(self) -> float:
        """Its checkpoints by its weight."""
        return self.num_checkpoints / self.weight

    def in_order(self) -> Iterator[int]:
        """Its visible checkpoints, the next to be evicted first."""
        max_reused = 3 * (len(self.once) + len(self.reused)) // 4
        while len(self.reused) > max_reused:
            oldest, _ = self.reused.popitem(last=False)
            self.once[oldest] = None
        return chain(self.once, self.reused)


class EvictionOrder:
    """The order in which checkpoints are evicted.

    Invariant: a checkpoint that was added and not removed counts for its tenant. Once it was shown, it is in one queue:
    its tenant's `once` or `reused`, or `_unreachable`. The tenants are in the order of `used_at`, and each has a
    checkpoint.
    """

    def __init__(self, num_uses: Sequence[int]) -> None:
        """`num_uses` says, by checkpoint, how many steps in flight use it; the caller changes it."""
        self._num_uses = num_uses
        self._tenants: OrderedDict[int, _Held] = OrderedDict()
        self._tenant_of = [0] * len(num_uses)
        self._unreachable: OrderedDict[int, None] = OrderedDict()
        self._num_begun = 0

    @property
    def visible(self) -> set[int]:
        """All that were shown."""
        queues = (queue for held in self._tenants.values() for queue in (held.once, held.reused))
        return set(self._unreachable).union(*queues)

    def add(self, checkpoint: int, tenant: int, weight: float) -> None:
        """Count a checkpoint that a step saves for a tenant, by its number."""
        self._tenant_of[checkpoint] = tenant
        if tenant not in self._tenants:
            self._tenants[tenant] = _Held(weight, 0)
        held = self._note_use(tenant)
        held.weight = weight
        held.num_checkpoints += 1

    def show(self, checkpoint: int) -> None:
        """The step has returned: the checkpoint may be evicted."""
        self._tenants[self._tenant_of[checkpoint]].once[checkpoint] = None

    def use(self, checkpoint: int) -> None:
        """Note that a step restores a checkpoint, which was shown."""
        held = self._note_use(self._tenant_of[checkpoint])
        self._take_out(checkpoint, held)
        held.reused[checkpoint] = None

    def demote(self, checkpoint: int) -> None:
        """Evict a checkpoint that was shown before all others, since it cannot be reached."""
        self._take_out(checkpoint, self._tenants[self._tenant_of[checkpoint]])
        self._unreachable[checkpoint] = None

    def remove(self, checkpoint: int) -> None:
        """Forget a checkpoint, shown or not."""
        tenant = self._tenant_of[checkpoint]
        held = self._tenants[tenant]
        self._take_out(checkpoint, held)
        held.num_checkpoints -= 1
        if not held.num_checkpoints:
            del self._tenants[tenant]

    def find_next(self) -> int | None:
        """The next checkpoint to evict, of those in no use; None if there is none.

        O(tenants with checkpoints), of which there are no more than checkpoints.
        """
        return next((each for each in self._in_order() if not self._num_uses[each]), None)

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        queues = [queue for held in self._tenants.values() for queue in (held.once, held.reused)]
        assert sum(map(len, queues)) + len(self._unreachable) == len(self.visible), "a checkpoint to be evicted twice"
        used_at = [held.used_at for held in self._tenants.values()]
        assert used_at == sorted(used_at), "tenants by their last use"
        for tenant, held in self._tenants.items():
            own = [each for each in self.visible if self._tenant_of[each] == tenant]
            assert set(own).issuperset([*held.once, *held.reused]), "a checkpoint of another tenant"
            assert 0 < held.num_checkpoints >= len(own), "the number of a tenant's checkpoints"

    def _in_order(self) -> Iterator[int]:
        yield from self._unreachable
        tenants = list(self._tenants.values())
        if len(tenants) > 1:
            tenants.sort(key=lambda held: -held.fullness)
            oldest = next(iter(self._tenants.values()))
            if self._num_begun - oldest.used_at > MAX_TURNOVERS * len(self._num_uses):
                tenants.insert(0, oldest)
        for held in tenants:
            yield from held.in_order()

    def _note_use(self, tenant: int) -> _Held:
        self._num_begun += 1
        self._tenants.move_to_end(tenant)
        held = self._tenants[tenant]
        held.used_at = self._num_begun
        return held

    def _take_out(self, checkpoint: int, held: _Held) -> None:
        for queue in (held.once, held.reused, self._unreachable):
            queue.pop(checkpoint, None)
