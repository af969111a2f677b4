"""What the memory of a process holds besides weights. Needs no torch: it is compared where the RPC server answers."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

# Beside the KV of so many tokens there is room for one saved state. Where states are large, a prompt's are saved about
# this often; where they are small, it costs next to nothing.
_TOKENS_PER_CHECKPOINT = 4096
# Where the number of blocks is set by hand, as in tests, so few tokens may be cached that hardly any would be saved.
_FEWEST_CHECKPOINTS = 16


class CacheRoom(NamedTuple):
    """The capacity of a process for an epoch."""

    num_blocks: int
    """KV blocks; 0 if it cannot hold a batch."""
    num_seqs: int = 0
    """Sequences that it can hold at once."""
    num_checkpoints: int = 0
    """Saved recurrent states beside those of running sequences."""


class CacheCosts(NamedTuple):
    """What a model keeps."""

    bytes_per_block: int
    tokens_per_block: int
    bytes_per_state: int
    """Bytes of one sequence's states; 0 for a model without recurrent states."""
    bytes_of_drafts: int = 0
    """What keeps drafts from the states, whatever the room is."""


def fewest(rooms: Sequence[CacheRoom]) -> CacheRoom:
    """What all processes of a group have."""
    return CacheRoom(*(min(column) for column in zip(*rooms, strict=True)))


def divide_memory(memory_bytes: int, costs: CacheCosts, max_num_seqs: int) -> CacheRoom:
    """Divide the memory between KV and states.

    The states of `max_num_seqs` sequences come first, but of as many as take half of the memory at most, since they
    need KV beside them. Of the rest, there is a checkpoint for every `_TOKENS_PER_CHECKPOINT` tokens of KV.

    Returns:
        No block if the memory does not hold one beside the state of a sequence.
    """
    memory_bytes -= costs.bytes_of_drafts
    if not costs.bytes_per_state:
        return CacheRoom(max(memory_bytes, 0) // costs.bytes_per_block, max_num_seqs)
    # One more state is that of padding.
    num_states = min(max_num_seqs + 1, max(memory_bytes // 2 // costs.bytes_per_state, 2))
    left = max(memory_bytes - num_states * costs.bytes_per_state, 0)
    kv_bytes = _TOKENS_PER_CHECKPOINT * costs.bytes_per_block // costs.tokens_per_block
    num_checkpoints = left // (costs.bytes_per_state + kv_bytes)
    num_blocks = (left - num_checkpoints * costs.bytes_per_state) // costs.bytes_per_block
    return CacheRoom(num_blocks, num_states - 1, num_checkpoints)


def memory_to_hold(num_tokens: int, costs: CacheCosts, max_num_seqs: int) -> int:
    """The least memory that `divide_memory` divides so that the KV has room for `num_tokens`, in bytes."""
    num_blocks = -(-num_tokens // costs.tokens_per_block)
    most = 1
    while divide_memory(most, costs, max_num_seqs).num_blocks < num_blocks:
        most *= 2
    sizes = range(most // 2, most)
    return (
        bisect.bisect_left(sizes, num_blocks, key=lambda size: divide_memory(size, costs, max_num_seqs).num_blocks)
        + most // 2
    )


def room_of_blocks(num_blocks: int, costs: CacheCosts, max_num_seqs: int) -> CacheRoom:
    """The room where the number of blocks is set by hand: states come on top of them."""
    if not costs.bytes_per_state:
        return CacheRoom(num_blocks, max_num_seqs)
    num_tokens = num_blocks * costs.tokens_per_block
    return CacheRoom(num_blocks, max_num_seqs, max(num_tokens // _TOKENS_PER_CHECKPOINT, _FEWEST_CHECKPOINTS))
