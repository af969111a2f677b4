"""How memory is divided between keys and values, live states and checkpoints."""

from __future__ import annotations

import pytest

from services.worker.runner.cache_room import CacheCosts, CacheRoom, divide_memory, fewest, room_of_blocks

PLAIN = CacheCosts(bytes_per_block=384 * 16, tokens_per_block=16, bytes_per_state=0)
# As Qwen3-Next with one rank: 24 KiB a token, 73.7 MiB a state.
HYBRID = CacheCosts(bytes_per_block=24576 * 16, tokens_per_block=16, bytes_per_state=77_266_944)


@pytest.mark.parametrize(
    ("memory_bytes", "num_blocks"), [(384 * 16, 1), (384 * 16 - 1, 0), (384 * 160 + 5, 10), (-1, 0)]
)
def test_without_states_only_whole_blocks_count(memory_bytes: int, num_blocks: int) -> None:
    assert divide_memory(memory_bytes, PLAIN, num_live=512) == CacheRoom(num_blocks)


def test_live_states_come_first_and_the_rest_is_divided_by_tokens() -> None:
    memory_bytes, num_live = 60 << 30, 65
    room = divide_memory(memory_bytes, HYBRID, num_live=num_live)
    used = room.num_blocks * HYBRID.bytes_per_block + (num_live + room.num_checkpoints) * HYBRID.bytes_per_state
    assert memory_bytes - HYBRID.bytes_per_block < used <= memory_bytes
    assert room.num_checkpoints == pytest.approx(room.num_blocks * 16 / 4096, rel=0.02)


def test_live_states_that_fill_the_memory_leave_no_block() -> None:
    assert divide_memory(64 * HYBRID.bytes_per_state, HYBRID, num_live=65) == CacheRoom(0, 0)
    assert divide_memory(65 * HYBRID.bytes_per_state, HYBRID, num_live=65) == CacheRoom(0, 0)


def test_blocks_that_are_set_by_hand_stay_as_they_are() -> None:
    assert room_of_blocks(5, PLAIN) == CacheRoom(5)
    assert room_of_blocks(5, HYBRID) == CacheRoom(5, 16)
    assert room_of_blocks(51200, HYBRID) == CacheRoom(51200, 200)


def test_a_group_has_what_each_of_its_processes_has() -> None:
    assert fewest([CacheRoom(7, 3), CacheRoom(5, 9)]) == CacheRoom(5, 3)
