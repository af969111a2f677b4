"""Changes to what a prefix cache holds, as outsiders are told of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.scheduler.core.cache.block_hashes import hash_salt
from services.scheduler.core.cache.cached_prefix import PrefixNode

Hashes = npt.NDArray[np.uint64]
Indexes = npt.NDArray[np.intp]


@dataclass(slots=True)
class StoredRuns:
    """Runs of blocks, each block following the one before it; one entry per run, but `hashes` has one per block."""

    hashes: list[int] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """The hash before the first block: that of a block or of the salt, and 0 when there is neither."""
    starts: list[int] = field(default_factory=list)
    """The number of blocks before the first one."""
    states: list[int] = field(default_factory=list)
    """The hashes of blocks, of these runs or stored before, after which a recurrent state is saved."""

    def add_present(self, node: PrefixNode, first: int, last: int) -> None:
        """Add those of a node's contents `first` to `last - 1` that a block holds; all must be hashed."""
        if node.num_present == node.num_blocks:
            self.add(node, first, last)
            return
        is_present = np.concatenate([[False], node.blocks[first:last] >= 0, [False]])
        edges = np.flatnonzero(is_present[1:] != is_present[:-1]) + first
        for start, end in edges.reshape(-1, 2).tolist():
            self.add(node, start, end)

    def add(self, node: PrefixNode, first: int, last: int) -> None:
        """Add a node's contents `first` to `last - 1`; all must be hashed."""
        self.hashes += node.hashes[first:last]
        self.num_blocks.append(last - first)
        self.parents.append(parent_hash(node, first) or 0)
        self.starts.append(node.start + first)


@dataclass(slots=True)
class KvChanges:
    """Changes that apply in this order: everything is cleared, blocks and states are removed, both are stored.

    With a block its state is removed.
    """

    is_cleared: bool = False
    removed: list[Hashes] = field(default_factory=list)
    num_removed: int = 0
    removed_states: list[int] = field(default_factory=list)
    """The hashes of blocks after which no recurrent state is saved any more."""
    stored: StoredRuns = field(default_factory=StoredRuns)

    @property
    def num_blocks(self) -> int:
        """Blocks and states that are removed and stored."""
        return self.num_removed + len(self.removed_states) + len(self.stored.hashes) + len(self.stored.states)

    @property
    def stores(self) -> bool:
        """Whether anything is stored."""
        return bool(self.stored.hashes or self.stored.states)


def parent_hash(node: PrefixNode, index: int) -> int | None:
    """The hash before a node's content `index`, which must have been computed; None when there is nothing before it."""
    if index:
        return node.hashes[index - 1]
    parent = node.parent
    assert parent is not None, "a root has no contents"
    return hash_salt(parent.key) if parent.parent is None else parent.hashes[parent.num_blocks - 1]
