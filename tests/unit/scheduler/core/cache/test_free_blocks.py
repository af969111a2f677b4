"""Free blocks are taken in order: blank ones, then the cached block that was freed first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.cache.cached_prefix import BlockIds
from services.scheduler.core.cache.free_blocks import FreeBlocks


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
