"""The free KV blocks, in order of reuse.

With several tenants, one that sends many prompts must not push out everybody else's prefixes. So a cached block belongs
to the tenant that freed it, and the next one is taken

1. from a tenant that has freed none while the pool was filled 8 times over, or one that left would keep its share;
2. else from the tenant with the most cached free blocks by its weight: all others are kept up to an equal share each.

Within a tenant the least recently freed block is taken first, so nothing changes with one tenant. A decision takes
O(log tenants).
"""

from __future__ import annotations

import numpy as np

from services.scheduler.core.cache.cached_prefix import BlockIds
from services.scheduler.core.cache.cached_queue import NOT_CACHED, CachedQueue
from services.scheduler.core.lazy_heap import MIN_STALE, LazyHeap

# A tenant that has freed no block keeps its cached ones until the pool has been filled this many times.
MAX_TURNOVERS = 8
# The part of a tenant's cached blocks that is taken at once, so it may fall this far below the others.
_PART = 16


class FreeBlocks:
    """Blank blocks, and cached ones, which are taken as the module says.

    Invariant: each cached block is in the queue of its tenant, in `_tenants`; `num_cached` counts them. `_queues` are
    in the order in which their tenants last freed blocks. With several of them, none is empty, and each is in `_heap`,
    the fullest first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_cached = 0
        # A stack, taken from its end: the lowest block number first.
        self._blank = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_blank = num_blocks
        self._tenants = np.zeros(num_blocks, np.int32)
        self._stamps = np.full(num_blocks, NOT_CACHED, np.int64)
        self._next_stamp = 0
        self._queues: dict[int, CachedQueue] = {}
        self._heap = LazyHeap(self._queues, lambda queue: -queue.fullness)

    def __len__(self) -> int:
        return self.num_blank + self.num_cached

    @property
    def cached(self) -> BlockIds:
        """The cached blocks; of each tenant, the next to be taken first."""
        return np.concatenate([np.empty(0, np.int32), *(queue.blocks for queue in self._queues.values())])

    @property
    def blank(self) -> BlockIds:
        """The blank blocks, the next to be taken last; must not be modified."""
        return self._blank[: self.num_blank]

    def add_blank(self, blocks: BlockIds) -> None:
        """Add blank blocks, the next to be taken last."""
        self._blank[self.num_blank : self.num_blank + len(blocks)] = blocks
        self.num_blank += len(blocks)

    def add_cached(self, blocks: BlockIds, tenant: int = 0, weight: float = 1.0) -> None:
        """Add cached blocks of a tenant, by its number, the least valuable first."""
        if not len(blocks):
            return
        queue = self._queues.get(tenant)
        if queue is None or len(self._queues) > 1:
            queue = self._move_to_end(tenant)
        queue.weight = weight
        queue.add(blocks, self._next_stamp)
        self._next_stamp += len(blocks)
        self._tenants[blocks] = tenant
        self.num_cached += len(blocks)
        if len(self._queues) > 1:
            self._heap.add(tenant)

    def revive(self, blocks: BlockIds) -> None:
        """Take out cached blocks, with their contents."""
        self._stamps[blocks] = NOT_CACHED
        self.num_cached -= len(blocks)
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            queue.num_blocks -= len(blocks)
            return
        tenants, counts = np.unique(self._tenants[blocks], return_counts=True)
        for tenant, count in zip(tenants.tolist(), counts.tolist(), strict=True):
            self._queues[tenant].num_blocks -= count
            self._drop_if_empty(tenant)

    def take_blank(self, num_blocks: int) -> BlockIds:
        """Take the next blank blocks; there must be enough."""
        num_left = self.num_blank - num_blocks
        blocks = self._blank[num_left : self.num_blank][::-1].copy()
        self.num_blank = num_left
        return blocks

    def take_cached(self, num_blocks: int) -> BlockIds:
        """Take the next cached blocks; there must be enough."""
        if len(self._queues) == 1:
            (queue,) = self._queues.values()
            blocks = queue.take(num_blocks)
        else:
            blocks = self._take_from_several(num_blocks)
        self._stamps[blocks] = NOT_CACHED
        self.num_cached -= len(blocks)
        return blocks

    def blank_all(self) -> None:
        """Turn all cached blocks into blank ones."""
        cached = self.cached
        self.add_blank(cached[::-1])
        self._stamps[cached] = NOT_CACHED
        self.num_cached = 0
        self._queues.clear()
        self._heap.clear()

    def check_integrity(self) -> None:
        """Assert the class's invariant."""
        for tenant, queue in self._queues.items():
            blocks = queue.blocks
            assert len(blocks) == queue.num_blocks, "the number of a tenant's cached blocks"
            assert (self._tenants[blocks] == tenant).all(), "a cached block's tenant"
        assert len(self.cached) == self.num_cached, "the number of cached blocks"
        assert self._next_stamp > max((queue.newest_stamp for queue in self._queues.values()), default=-1), "stamps"
        if len(self._queues) > 1:
            assert len(self._heap) <= 2 * len(self._queues) + MIN_STALE + 1, "stale entries"
            assert all(queue.num_blocks for queue in self._queues.values()), "an empty queue"
            self._heap.check_integrity()

    def _move_to_end(self, tenant: int) -> CachedQueue:
        queue = self._queues.pop(tenant, None)
        if queue is None:
            queue = CachedQueue(self._stamps)
            if len(self._queues) == 1:
                # While it was alone, the other one could be empty, and had no use for the heap.
                (other,) = self._queues
                self._heap.add(other)
                self._drop_if_empty(other)
        self._queues[tenant] = queue
        return queue

    def _take_from_several(self, num_blocks: int) -> BlockIds:
        taken = []
        while num_blocks:
            tenant = self._next_tenant()
            queue = self._queues[tenant]
            taken.append(queue.take(min(num_blocks, queue.num_blocks // _PART + 1)))
            num_blocks -= len(taken[-1])
            self._drop_if_empty(tenant)
        return np.concatenate(taken)

    def _next_tenant(self) -> int:
        """The tenant that gives the next cached block."""
        oldest, queue = next(iter(self._queues.items()))
        if self._next_stamp - queue.newest_stamp > MAX_TURNOVERS * len(self._stamps):
            return oldest
        fullest = self._heap.lowest()
        assert fullest is not None
        return fullest

    def _drop_if_empty(self, tenant: int) -> None:
        if not self._queues[tenant].num_blocks:
            del self._queues[tenant]
