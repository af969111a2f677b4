"""What one rank's prefix cache holds, as hashes for outsiders, while any of them listens.

Hashing is put off, and done in slices of a few blocks between the events of the engine:

    publish                ─► the node is due ─► `advance` hashes some of its contents ─► stored  ─┐
    evict, hide            ─► those of the contents that have a hash ───────────────────► removed ─┼─► `take`
    flush, end of an epoch ──────────────────────────────────────────────────────────────► cleared ─┘

The hashes are kept in the nodes of the tree, next to the contents, so the tree may change between two slices: a split
divides them, a cut drops them, and a node that goes takes them along. A content that is removed before it was hashed
was never reported, and its removal is not either. A recurrent state after a content is reported with it, or as a change
once the content has a hash. So a listener knows the contents that a block holds and that have a
hash, all of them once nothing is due. Hashes depend only on the contents, so those of earlier feeds remain valid.

**A snapshot** for a late listener is a scan (`KvScan`) over the nodes by their numbers, in slices too. The listener
also gets every change from the moment when the scan began, in order. A slice reports contents that are held at that
moment, and changes that come later are delivered later, so the two agree without a copy of the tree:

- What the listener has been told of is held, at any moment.
- When the scan has visited every node, it has been told of all that is held and not due: a content that came during the
  scan was reported as a change, and any other was in a node when the scan came to it. A split moves contents to a node
  whose number may have been passed, so the scan visits these nodes again at its end.
- A content may be reported twice, by the scan and as a change; and one that was not reported yet may be removed.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from services.scheduler.core.cache.block_hashes import hash_blocks
from services.scheduler.core.cache.cached_prefix import PrefixNode
from services.scheduler.core.cache.kv_changes import Hashes, Indexes, KvChanges, StoredRuns, parent_hash
from services.scheduler.core.cache.state_checkpoints import StateCheckpoints

# The most blocks in one `KvChanges`, give or take a slice: what is made of it must be a small message.
MAX_BLOCKS = 2048


class KvFeed:
    """Collects the changes of a rank's prefix cache, in order, from one epoch to the next.

    Invariant: a node with a hash has ancestors whose contents all have one. A content that a block holds, and that has
    no hash, is in a node that is due or that a scan has yet to visit.
    """

    def __init__(self, block_bytes: int) -> None:
        """`block_bytes` is the size of the tokens of a block."""
        self._block_bytes = block_bytes
        self.states: StateCheckpoints | None = None
        """The checkpoints of the cache that is watched; None for a model without recurrent states."""
        self._log: deque[KvChanges] = deque()
        self._scans: list[KvScan] = []
        self.watch([])

    def watch(self, nodes: list[PrefixNode]) -> None:
        """Use the nodes of a cache from now on: a list that grows with it, and keeps nodes that have gone."""
        self._nodes = nodes
        self._due: dict[PrefixNode, None] = {}
        for scan in self._scans:
            scan.restart(nodes)

    @property
    def is_hashing(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self._due)

    @property
    def has_changes(self) -> bool:
        """Whether `take` returns something."""
        return bool(self._log)

    def on_cleared(self, nodes: list[PrefixNode]) -> None:
        """Nothing is held any more; earlier changes that were not taken are dropped."""
        self._log.clear()
        self._log.append(KvChanges(is_cleared=True))
        self.watch(nodes)

    def on_appended(self, node: PrefixNode) -> None:
        """A node has new contents, or is new."""
        if len(node.hashes) < node.num_blocks:
            self._due[node] = None

    def on_held(self, node: PrefixNode, first: int, is_new: npt.NDArray[np.bool_]) -> None:
        """Blocks are about to hold a node's contents from `first` on; no block holds those that are new."""
        for index in (is_new.nonzero()[0] + first).tolist():
            if index < len(node.hashes):
                self._open_for_stored().add(node, index, index + 1)
        self.on_appended(node)

    def on_split(self, head: PrefixNode) -> None:
        """The first contents of a node, with their hashes, have become a node of their own."""
        self.on_appended(head)
        for scan in self._scans:
            scan.revisit(head)

    def on_removed(self, node: PrefixNode, indexes: Indexes) -> None:
        """No block holds these contents of a node any more, by their indexes in it."""
        if not node.hashes:
            return
        hashes = np.frombuffer(node.hashes, np.uint64)[indexes[indexes < len(node.hashes)]]
        for start in range(0, len(hashes), MAX_BLOCKS):
            self._add_removed(hashes[start : start + MAX_BLOCKS])

    def on_state(self, node: PrefixNode, index: int, *, is_saved: bool) -> None:
        """A recurrent state after a node's content can be restored from now on, or no longer."""
        if index >= len(node.hashes):
            return
        if is_saved:
            self._open_for_stored().states.append(node.hashes[index])
        else:
            self._open_for_removed().removed_states.append(node.hashes[index])

    def report(self, stored: StoredRuns, node: PrefixNode, first: int, last: int) -> None:
        """Add those of a node's contents `first` to `last - 1` that a block holds, with states; all must be hashed."""
        stored.add_present(node, first, last)
        if self.states is not None:
            blocks = node.blocks[first:last]
            indexes = (blocks >= 0).nonzero()[0]
            indexes = indexes[self.states.are_saved(blocks[indexes])]
            stored.states += [node.hashes[first + index] for index in indexes.tolist()]

    def advance(self, max_blocks: int) -> None:
        """Hash up to `max_blocks` contents that are due."""
        while self._due and max_blocks > 0:
            node = next(iter(self._due))
            max_blocks -= self.hash_some(node, max_blocks)
            if len(node.hashes) >= node.num_blocks or is_gone(node):
                del self._due[node]

    def hash_some(self, node: PrefixNode, max_blocks: int) -> int:
        """Hash up to `max_blocks` contents of a node or, first, of its ancestors; reports those that are held.

        Returns:
            The number of contents hashed, but at least 1.
        """
        if is_gone(node):
            return 1
        node = _first_unhashed(node)
        first = len(node.hashes)
        last = min(first + max_blocks, node.num_blocks)
        if first == last:
            return 1
        tokens = node.tokens[first * self._block_bytes : last * self._block_bytes]
        hashes = hash_blocks(parent_hash(node, first), tokens, self._block_bytes)
        node.hashes.extend(hashes)
        self.report(self._open_for_stored(), node, first, last)
        return last - first

    def take(self) -> KvChanges:
        """Take the oldest changes; there must be some."""
        return self._log.popleft()

    def scan(self) -> KvScan:
        """Begin a scan; `end_scan` must follow."""
        scan = KvScan(self, self._nodes)
        self._scans.append(scan)
        return scan

    def end_scan(self, scan: KvScan) -> None:
        """Forget a scan."""
        self._scans.remove(scan)

    def _open_for_stored(self) -> StoredRuns:
        if not self._log or self._log[-1].num_blocks >= MAX_BLOCKS:
            self._log.append(KvChanges())
        return self._log[-1].stored

    def _add_removed(self, hashes: Hashes) -> None:
        changes = self._open_for_removed()
        changes.removed.append(hashes)
        changes.num_removed += len(hashes)

    def _open_for_removed(self) -> KvChanges:
        """Removals apply first, so they cannot join changes that store something."""
        if not self._log or self._log[-1].stores or self._log[-1].num_blocks >= MAX_BLOCKS:
            self._log.append(KvChanges())
        return self._log[-1]


class KvScan:
    """A late listener's walk over all nodes of a feed; see the module."""

    def __init__(self, feed: KvFeed, nodes: list[PrefixNode]) -> None:
        self._feed = feed
        self.restart(nodes)

    def restart(self, nodes: list[PrefixNode]) -> None:
        """Begin again, with the nodes of another cache."""
        self.is_done = False
        self._nodes = nodes
        self._next_id = 0
        self._split_off: list[PrefixNode] = []
        self._node: PrefixNode | None = None
        # The node's contents from the first of these to the second, as depths of the path, are still to be reported.
        self._depth = self._end = 0

    def revisit(self, head: PrefixNode) -> None:
        """Visit a node at the end, because its contents came from another one."""
        self._split_off.append(head)

    def advance(self, max_blocks: int) -> StoredRuns:
        """Visit up to `max_blocks` contents or nodes; returns those contents that the feed had reported before.

        The changes of the feed so far must have been taken. The feed reports those that have no hash yet.
        """
        stored = StoredRuns()
        while max_blocks > 0 and not self.is_done:
            if self._node is None:
                self._begin_node()
            if self._node is not None:
                max_blocks -= self._visit(self._node, max_blocks, stored)
        return stored

    def _begin_node(self) -> None:
        if self._next_id < len(self._nodes):
            self._node = self._nodes[self._next_id]
            self._next_id += 1
        elif self._split_off:
            self._node = self._split_off.pop()
        else:
            self.is_done = True
            return
        self._depth = self._node.start
        self._end = self._depth + len(self._node.hashes)

    def _visit(self, node: PrefixNode, max_blocks: int, stored: StoredRuns) -> int:
        """Returns how many contents were visited, but at least 1."""
        # The node may have been split or cut since the last slice.
        first = max(self._depth - node.start, 0)
        last = min(first + max_blocks, self._end - node.start, len(node.hashes))
        if first < last and not is_gone(node):
            self._feed.report(stored, node, first, last)
            self._depth = node.start + last
            return last - first
        if len(node.hashes) < node.num_blocks and not is_gone(node):
            return self._feed.hash_some(node, max_blocks)
        self._node = None
        return 1


def is_gone(node: PrefixNode) -> bool:
    """Whether a node has left the tree, or is about to."""
    return not node.num_present and not node.children


def _first_unhashed(node: PrefixNode) -> PrefixNode:
    """The node itself, or the first of its ancestors that has a content without a hash."""
    while node.parent is not None and len(node.parent.hashes) < node.parent.num_blocks:
        node = node.parent
    return node
