"""How memory is divided between keys and values, live states and checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.runner.cache_room import (
    CacheCosts,
    CacheRoom,
    divide_memory,
    fewest,
    memory_to_hold,
    room_of_blocks,
)

PLAIN = CacheCosts(bytes_per_block=384 * 16, tokens_per_block=16, bytes_per_state=0)
# As Qwen3-Next with one rank: 24 KiB a token, 73.7 MiB a state.
HYBRID = CacheCosts(bytes_per_block=24576 * 16, tokens_per_block=16, bytes_per_state=77_266_944)


@pytest.mark.parametrize(
    ("memory_bytes", "num_blocks"), [(384 * 16, 1), (384 * 16 - 1, 0), (384 * 160 + 5, 10), (-1, 0)]
)
def test_without_states_only_whole_blocks_count(memory_bytes: int, num_blocks: int) -> None:
    assert divide_memory(memory_bytes, PLAIN, 512) == CacheRoom(num_blocks, 512)


@pytest.mark.parametrize("memory_gib", [60, 20, 2, 0.3])
def test_live_states_come_first_with_at_most_half_and_the_rest_is_divided_by_tokens(memory_gib: float) -> None:
    memory_bytes = int(memory_gib * (1 << 30))
    room = divide_memory(memory_bytes, HYBRID, 64)
    # One more state is that of padding.
    states_bytes = (1 + room.num_seqs) * HYBRID.bytes_per_state
    assert room.num_seqs == min(64, memory_bytes // 2 // HYBRID.bytes_per_state - 1)
    used = room.num_blocks * HYBRID.bytes_per_block + states_bytes + room.num_checkpoints * HYBRID.bytes_per_state
    assert memory_bytes - HYBRID.bytes_per_block < used <= memory_bytes
    assert room.num_checkpoints == pytest.approx(room.num_blocks * 16 / 4096, rel=0.02, abs=2)


def test_one_sequence_fits_as_long_as_there_is_a_block_beside_its_state() -> None:
    memory_bytes = 2 * HYBRID.bytes_per_state + HYBRID.bytes_per_block
    assert divide_memory(memory_bytes, HYBRID, 64) == CacheRoom(1, 1, 0)
    for too_few in (memory_bytes - 1, HYBRID.bytes_per_state, -1):
        assert not divide_memory(too_few, HYBRID, 64).num_blocks


DRAFTED = HYBRID._replace(bytes_of_drafts=10**9)


@given(st.integers(1, 1 << 20), st.sampled_from([PLAIN, HYBRID, DRAFTED]), st.integers(1, 99))
def test_the_memory_to_hold_tokens_holds_them_and_a_byte_less_does_not(
    num_tokens: int, costs: CacheCosts, max_num_seqs: int
) -> None:
    memory_bytes = memory_to_hold(num_tokens, costs, max_num_seqs)
    assert divide_memory(memory_bytes, costs, max_num_seqs).num_blocks * 16 >= num_tokens
    assert divide_memory(memory_bytes - 1, costs, max_num_seqs).num_blocks * 16 < num_tokens


def test_blocks_that_are_set_by_hand_stay_as_they_are() -> None:
    assert room_of_blocks(5, PLAIN, 8) == CacheRoom(5, 8)
    assert room_of_blocks(5, HYBRID, 8) == CacheRoom(5, 8, 16)
    assert room_of_blocks(51200, HYBRID, 8) == CacheRoom(51200, 8, 200)


def test_a_group_has_what_each_of_its_processes_has() -> None:
    assert fewest([CacheRoom(7, 8, 3), CacheRoom(5, 9, 9)]) == CacheRoom(5, 8, 3)
