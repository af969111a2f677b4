"""An outsider's index of what a rank's prefix cache holds, and the truth that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh64_intdigest

from services.scheduler.core.cache.cached_prefix import PrefixNode
from services.scheduler.core.cache.kv_changes import KvChanges, StoredRuns
from services.scheduler.core.cache.kv_feed import KvFeed, KvScan
from services.scheduler.core.cache.prefix_cache import PrefixCache


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
    num_cleared: int = 0

    def apply(self, changes: KvChanges) -> None:
        """Apply the next changes."""
        if changes.is_cleared:
            self.blocks.clear()
            self.num_cleared += 1
        assert changes.num_removed == sum(map(len, changes.removed))
        for hashes in changes.removed:
            self.remove(hashes.tolist())
        self.store(changes.stored)

    def remove(self, hashes: Sequence[int]) -> None:
        """Remove blocks, known or not."""
        for block_hash in hashes:
            self.blocks.pop(block_hash, None)

    def store(self, stored: StoredRuns) -> None:
        """Store runs of blocks, known or not."""
        self.store_columns(stored.hashes, stored.num_blocks, stored.parents, stored.starts)

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
    held: dict[int, Block] = {}
    for salt, root in cache._roots.items():
        before = xxh64_intdigest(salt).to_bytes(8, "little") if salt else b""
        for child in root.children.values():
            _collect(child, before, 4 * block_size, held)
    return held


def _collect(node: PrefixNode, before: bytes, block_bytes: int, held: dict[int, Block]) -> None:
    for index, block in enumerate(node.blocks[: node.num_blocks].tolist()):
        block_hash = xxh64_intdigest(before + node.tokens[index * block_bytes : (index + 1) * block_bytes])
        if block >= 0:
            held[block_hash] = Block(int.from_bytes(before, "little"), node.start + index)
        before = block_hash.to_bytes(8, "little")
    for child in node.children.values():
        _collect(child, before, block_bytes, held)
