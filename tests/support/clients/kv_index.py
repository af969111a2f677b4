"""An outsider's index of what a rank's prefix cache holds, and the truth that it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh64_intdigest

from services.scheduler.core.cache.cached_prefix import PrefixNode
from services.scheduler.core.cache.kv_changes import KvChanges, StoredRuns
from services.scheduler.core.cache.kv_feed import KvFeed, KvScan
from services.scheduler.core.cache.prefix_cache import PrefixCache
from services.scheduler.core.cache.state_checkpoints import StateCheckpoints


@dataclass(frozen=True, slots=True)
class Block:
    """What an outsider learns of a block besides its hash."""

    parent: int
    start: int
    """The number of blocks before it."""


@dataclass
class KvIndex:
    """Blocks by their hashes, from the changes alone."""

    blocks: dict[int, Block] = field(default_factory=dict)
    states: set[int] = field(default_factory=set)
    """The hashes of blocks after which a recurrent state is saved."""
    num_cleared: int = 0

    def apply(self, changes: KvChanges) -> None:
        """Apply the next changes."""
        if changes.is_cleared:
            self.clear()
        assert changes.num_removed == sum(map(len, changes.removed))
        for hashes in changes.removed:
            self.remove(hashes.tolist())
        self.states.difference_update(changes.removed_states)
        self.store(changes.stored)

    def clear(self) -> None:
        """Nothing is held any more."""
        self.blocks.clear()
        self.states.clear()
        self.num_cleared += 1

    def num_usable(self, hashes: Sequence[int], *, has_recurrent_state: bool) -> int:
        """How many of a prompt's blocks can be used."""
        num_held = next((number for number, each in enumerate(hashes) if each not in self.blocks), len(hashes))
        if not has_recurrent_state:
            return num_held
        return max((number for number in range(1, num_held + 1) if hashes[number - 1] in self.states), default=0)

    def remove(self, hashes: Sequence[int]) -> None:
        """Remove blocks, known or not."""
        for block_hash in hashes:
            self.blocks.pop(block_hash, None)
            self.states.discard(block_hash)

    def store(self, stored: StoredRuns) -> None:
        """Store runs of blocks, known or not."""
        self.store_columns(stored.hashes, stored.num_blocks, stored.parents, stored.starts)
        self.states.update(stored.states)

    def store_columns(
        self, hashes: Sequence[int], num_blocks: Sequence[int], parents: Sequence[int], starts: Sequence[int]
    ) -> None:
        """Store runs of blocks, by their columns."""
        assert sum(num_blocks) == len(hashes)
        remaining = iter(hashes)
        for count, run_parent, start in zip(num_blocks, parents, starts, strict=True):
            assert count
            parent = run_parent
            for index in range(count):
                block_hash = next(remaining)
                self.blocks[block_hash] = Block(parent, start + index)
                parent = block_hash


class Listener:
    """An outsider that began to listen late: a scan of the feed, and all changes since."""

    def __init__(self, feed: KvFeed) -> None:
        self.index = KvIndex()
        self.scan: KvScan = feed.scan()

    def advance(self, max_blocks: int) -> None:
        """Let the scan go on."""
        self.index.store(self.scan.advance(max_blocks))


def held_blocks(cache: PrefixCache, block_size: int) -> dict[int, Block]:
    """What a cache holds, read from its tree."""
    return {block_hash: block for block_hash, block, _ in _read(cache, block_size)}


def held_states(cache: PrefixCache, states: StateCheckpoints | None, block_size: int) -> set[int]:
    """The hashes of the blocks after which a recurrent state is saved."""
    numbers = {block_hash: number for block_hash, _, number in _read(cache, block_size)}
    if states is None or not numbers:
        return set()
    are_saved = states.are_saved(np.fromiter(numbers.values(), np.int32))
    return {block_hash for block_hash, is_saved in zip(numbers, are_saved.tolist(), strict=True) if is_saved}


def _read(cache: PrefixCache, block_size: int) -> Iterator[tuple[int, Block, int]]:
    """The hash of each block, what is known of it, and its number."""
    for salt, root in cache._roots.items():
        before = xxh64_intdigest(salt).to_bytes(8, "little") if salt else b""
        for child in root.children.values():
            yield from _read_node(child, before, 4 * block_size)


def _read_node(node: PrefixNode, before: bytes, block_bytes: int) -> Iterator[tuple[int, Block, int]]:
    for index, block in enumerate(node.blocks[: node.num_blocks].tolist()):
        block_hash = xxh64_intdigest(before + node.tokens[index * block_bytes : (index + 1) * block_bytes])
        if block >= 0:
            yield block_hash, Block(int.from_bytes(before, "little"), node.start + index), block
        before = block_hash.to_bytes(8, "little")
    for child in node.children.values():
        yield from _read_node(child, before, block_bytes)
