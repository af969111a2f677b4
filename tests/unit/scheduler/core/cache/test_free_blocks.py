"""Free blocks are taken in order: blank ones, then the cached block that its tenant freed first."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.cache.cached_prefix import BlockIds
from services.scheduler.core.cache.free_blocks import MAX_TURNOVERS, FreeBlocks


def as_block_ids(blocks: list[int]) -> BlockIds:
    return np.array(blocks, np.int32)


def take(free: FreeBlocks, num_blocks: int) -> tuple[list[int], list[int]]:
    num_blank = min(num_blocks, free.num_blank)
    return list(free.take_blank(num_blank)), list(
        free.take_cached(num_blocks - num_blank) if num_blocks > num_blank else []
    )


def test_a_new_pool_is_taken_in_order() -> None:
    free = FreeBlocks(4)
    assert take(free, 3) == ([0, 1, 2], [])
    assert len(free) == 1


def test_blank_blocks_are_taken_first_then_cached_ones_in_order_of_release() -> None:
    free = FreeBlocks(4)
    free.take_blank(4)
    free.add_cached(as_block_ids([3, 1]))
    free.add_blank(as_block_ids([2, 0]))
    assert (len(free), free.num_cached) == (4, 2)
    assert take(free, 3) == ([0, 2], [3])
    assert take(free, 1) == ([], [1])


def test_a_revived_block_goes_to_the_end_when_it_is_freed_again() -> None:
    free = FreeBlocks(3)
    free.take_blank(3)
    free.add_cached(as_block_ids([0, 1, 2]))
    free.revive(as_block_ids([0, 2]))
    free.add_cached(as_block_ids([0]))
    assert free.cached.tolist() == [1, 0]
    assert take(free, 2) == ([], [1, 0])


def test_blocks_made_blank_are_no_longer_cached() -> None:
    free = FreeBlocks(3)
    free.take_blank(2)
    free.add_cached(as_block_ids([1, 0]))
    free.blank_all()
    assert (free.num_cached, sorted(free.blank.tolist())) == (0, [0, 1, 2])
    assert len(take(free, 3)[0]) == 3


@given(st.lists(st.lists(st.integers(0, 99), unique=True, max_size=99), max_size=40))
def test_the_order_survives_any_number_of_revivals(batches: list[list[int]]) -> None:
    free = FreeBlocks(100)
    free.take_blank(100)
    order = list(range(100))
    free.add_cached(as_block_ids(order))
    for batch in batches:
        free.revive(as_block_ids(batch))
        free.add_cached(as_block_ids(batch))
        order = [block for block in order if block not in batch] + batch
    assert free.cached.tolist() == order
    num_taken = len(order) // 2
    assert take(free, num_taken) == ([], order[:num_taken])
    assert take(free, 100 - num_taken) == ([], order[num_taken:])


WEIGHTS = {0: 1.0, 3: 2.0, 7: 0.5}
POOL = 40


class TenantsModel:
    """Each tenant's cached blocks in order of release, and those in use."""

    def __init__(self) -> None:
        self.free = FreeBlocks(POOL)
        self.in_use = self.free.take_blank(POOL).tolist()
        self.cached: dict[int, list[int]] = {tenant: [] for tenant in WEIGHTS}
        self.tenant_of: dict[int, int] = {}

    def add(self, tenant: int, num_blocks: int) -> None:
        """Free some of the blocks in use."""
        blocks, self.in_use = self.in_use[:num_blocks], self.in_use[num_blocks:]
        self.free.add_cached(as_block_ids(blocks), tenant, WEIGHTS[tenant])
        self.cached[tenant] += blocks
        self.tenant_of |= dict.fromkeys(blocks, tenant)

    def revive(self, places: list[int]) -> None:
        """Revive cached blocks of any tenants."""
        cached = [block for blocks in self.cached.values() for block in blocks]
        revived = [cached[place] for place in places if place < len(cached)]
        self.free.revive(as_block_ids(revived))
        self.cached = {tenant: [one for one in blocks if one not in revived] for tenant, blocks in self.cached.items()}
        self.in_use += revived

    def fullness(self, tenant: int) -> float:
        """Its blocks by its weight."""
        return len(self.cached[tenant]) / WEIGHTS[tenant]

    def take(self, num_blocks: int) -> None:
        """Take blocks, and check whose they are."""
        num_blocks = min(num_blocks, self.free.num_cached)
        if not num_blocks:
            return
        most = max(map(self.fullness, WEIGHTS))
        fullest = [tenant for tenant in WEIGHTS if self.fullness(tenant) == most]
        taken = self.free.take_cached(num_blocks).tolist()
        for tenant, blocks in self.cached.items():
            own = [block for block in taken if block in blocks]
            assert own == blocks[: len(own)], "not what the tenant freed first"
            assert not own or num_blocks > 1 or tenant in fullest
            self.cached[tenant] = blocks[len(own) :]
        most = max(map(self.fullness, WEIGHTS))
        for tenant in {self.tenant_of[block] for block in taken}:
            # A 16th of what it had, and one block, below the others at most.
            assert (self.fullness(tenant) + 1 / WEIGHTS[tenant]) * 16 / 15 + 1 / WEIGHTS[tenant] >= most
        self.in_use += taken


@settings(max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from(sorted(WEIGHTS)), st.integers(1, 8)),
            st.tuples(st.just("revive"), st.lists(st.integers(0, POOL), unique=True, max_size=5)),
            st.tuples(st.just("take"), st.integers(1, 10)),
            st.tuples(st.just("take"), st.just(1)),
        ),
        max_size=40,
    )
)
def test_the_tenant_with_most_cached_blocks_by_weight_gives_them_first(actions: list[tuple[str, int]]) -> None:
    model = TenantsModel()
    for action, *arguments in actions:
        getattr(model, action)(*arguments)
        model.free.check_integrity()
        assert sorted(model.free.cached.tolist()) == sorted(block for own in model.cached.values() for block in own)


def test_a_tenant_that_left_keeps_its_blocks_for_a_while_only() -> None:
    free = FreeBlocks(8)
    free.take_blank(8)
    free.add_cached(as_block_ids([0, 1]), 5)
    free.add_cached(as_block_ids([2, 3, 4, 5, 6, 7]), 6)
    for _ in range(8 * MAX_TURNOVERS - 6):
        (block,) = free.take_cached(1)
        assert block not in (0, 1)
        free.add_cached(as_block_ids([block]), 6)
    assert free.take_cached(2).tolist() == [0, 1]


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    free = FreeBlocks(8)
    free.take_blank(8)
    free.add_cached(as_block_ids([0, 1]), 1)
    for tenant in range(2, 500):
        free.add_cached(as_block_ids([2, 3]), tenant)
        free.revive(as_block_ids([2, 3]))
        free.check_integrity()
    assert free.cached.tolist() == [0, 1]
