"""Which KV block holds which prefix: a radix tree over whole blocks.

A node is a run of blocks, so the cost per prompt hardly depends on its length or on the block size. With a letter for
the tokens of one block, the prompts ABCDE and ABCF give

    root of the salt
    └─ A B C      blocks 7 3 9
       ├─ D E     blocks - 5      D's block was reused; E is found again once D is recomputed
       └─ F       blocks 2

Tokens are compared, not hashes, so a collision cannot lead to a wrong block. Python seeds the hash of `bytes` per
process, so crafted prompts cannot make lookups slow either.

Source: SGLang's RadixAttention, arXiv:2312.07104, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from services.scheduler.core.cache.cached_prefix import NO_BLOCKS, BlockIds, CachedPrefix, PrefixCursor, PrefixNode
from services.scheduler.core.cache.kv_feed import KvFeed
from shared.step.columns import Int32Column

_NO_BLOCK = -1
_NO_NODE = -1
_TOKEN_DTYPE = np.int32
# A longer run is not extended, since that copies it; what follows becomes a node of its own.
_LONGEST_EXTENDED = 1024


class PrefixCache:
    """Finds blocks by the prefix they were computed under.

    A content stays in the tree while a block holds it or a longer content stays: once a head whose block was reused is
    recomputed, its cached tails are reachable again. Only the newest block of a content holds it.

    Invariant: for each block, `_node_ids` and `_depths` say which node has it and which content of the path it holds.
    """

    def __init__(self, num_blocks: int, block_size: int, feed: KvFeed | None = None) -> None:
        """Make an empty cache; `feed` is told of it and of its changes."""
        self._feed = feed
        self._block_size = block_size
        self._block_bytes = block_size * np.dtype(_TOKEN_DTYPE).itemsize
        self._node_ids = np.full(num_blocks, _NO_NODE, np.int32)
        self._depths = np.zeros(num_blocks, np.int32)
        self._clear()

    def set_feed(self, feed: KvFeed | None) -> None:
        """Tell a feed of all changes from now on; None ends that."""
        self._feed = feed
        if feed is not None:
            feed.watch(self._nodes)

    def find(self, salt: bytes, tokens: bytearray, *, max_blocks: int) -> CachedPrefix:
        """Find the longest cached prefix, of at most `max_blocks` full blocks.

        `tokens` are little-endian int32, at least `max_blocks` blocks.
        """
        node = self._roots.get(salt)
        cursor = PrefixCursor(self._era, salt, node)
        found: list[BlockIds] = []
        while node is not None:
            cursor.node, cursor.num_cuts, cursor.depth = node, node.num_cuts, cursor.num_blocks
            start = cursor.depth * self._block_bytes
            # Past the last block the key is shorter than any child's.
            node = node.children.get(
                bytes(tokens[start : min(start + self._block_bytes, max_blocks * self._block_bytes)])
            )
            if node is None:
                break
            num_found = self._num_common(node, tokens, cursor.depth, max_blocks)
            if node.num_present < node.num_blocks:
                num_found = _num_before_hole(node.blocks[:num_found])
            if num_found:
                found.append(node.blocks[:num_found])
                cursor.num_blocks += num_found
            if num_found < node.num_blocks:
                break
        blocks = found[0].copy() if len(found) == 1 else np.concatenate(found) if found else NO_BLOCKS
        return CachedPrefix(self.version, blocks, cursor, cursor.num_blocks * self._block_size)

    def publish(self, cursor: PrefixCursor, block_table: BlockIds, *, tokens: bytearray, num_blocks: int) -> BlockIds:
        """Advance a cursor, in place, to `num_blocks` blocks, which can now be found; none may hold a content yet.

        Does nothing for a cursor of a past era, because the blocks before it were flushed.

        Args:
            block_table: The sequence's blocks.
            tokens: Little-endian int32, at least `num_blocks` blocks.
            num_blocks: More than the cursor has.

        Returns:
            Blocks that lost their contents to newer blocks.
        """
        if cursor.era is not self._era:
            return NO_BLOCKS
        self.version = object()
        node, depth = self._resume(cursor)
        # Blocks found or published earlier are not published again for this sequence.
        num_before = cursor.num_blocks
        displaced: list[BlockIds] = []
        while depth < num_blocks:
            child = self._child(node, tokens, depth)
            if child is None:
                node = self._append(node, tokens, block_table[:num_blocks], num_before)
                depth = num_blocks
                break
            num_common = self._num_common(child, tokens, depth, num_blocks)
            if num_common < child.num_blocks and depth + num_common < num_blocks:
                child = self._split(child, num_common)
            first = max(num_before - depth, 0)
            if first < num_common:
                displaced += self._hold(child, first, block_table[depth + first : depth + num_common])
            if num_common < child.num_blocks:
                break
            node, depth = child, depth + num_common
        cursor.node, cursor.num_cuts, cursor.depth, cursor.num_blocks = node, node.num_cuts, depth, num_blocks
        return np.concatenate(displaced) if displaced else NO_BLOCKS

    def holds(self, blocks: BlockIds) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of these blocks hold a content: [num_blocks]."""
        holds: np.ndarray[tuple[int], np.dtype[np.bool_]] = self._node_ids[blocks] != _NO_NODE
        return holds

    def depths(self, blocks: BlockIds) -> Int32Column:
        """How many contents are before those that blocks hold, or held last: [num_blocks]."""
        depths: Int32Column = self._depths[blocks]
        return depths

    def find_behind(self, blocks: BlockIds) -> BlockIds:
        """Find the blocks whose contents continue those of `blocks`, which must hold some; they may be among them."""
        node_ids = self._node_ids[blocks]
        behind = [NO_BLOCKS]
        below: dict[int, PrefixNode] = {}
        for node_id in np.unique(node_ids).tolist():
            node = self._nodes[node_id]
            first = int(self._depths[blocks[node_ids == node_id]].min()) - node.start
            behind.append(node.blocks[first + 1 : node.num_blocks])
            nodes = list(node.children.values())
            while nodes:
                child = nodes.pop()
                if child.id not in below:
                    below[child.id] = child
                    nodes += child.children.values()
        behind += [node.blocks[: node.num_blocks] for node in below.values()]
        found = np.concatenate(behind)
        present: BlockIds = found[found != _NO_BLOCK]
        return present

    def note_state(self, block: int, *, is_saved: bool) -> None:
        """Tell the feed that the recurrent state after a block's content can be restored from now on, or no longer."""
        node_id = int(self._node_ids[block])
        if self._feed is not None and node_id != _NO_NODE:
            node = self._nodes[node_id]
            self._feed.on_state(node, int(self._depths[block]) - node.start, is_saved=is_saved)

    def void_lookups(self) -> None:
        """Let everything be looked up again, because more or less can be used of what is found."""
        self.version = object()

    def forget(self, blocks: BlockIds) -> None:
        """Remove the contents of blocks."""
        node_ids = self._node_ids[blocks]
        self._node_ids[blocks] = _NO_NODE
        self.version = object()
        bounds = [0, *((node_ids[1:] != node_ids[:-1]).nonzero()[0] + 1).tolist(), len(blocks)]
        for start, end in pairwise(bounds):
            node = self._nodes[node_ids[start]]
            node.num_present -= end - start
            if self._feed is not None:
                self._feed.on_removed(node, self._depths[blocks[start:end]] - node.start)
            if node.num_present or node.children:
                node.blocks[self._depths[blocks[start:end]] - node.start] = _NO_BLOCK
            if not node.children:
                self._prune(node)

    def flush(self) -> BlockIds:
        """Forget all contents and void all cursors; returns the blocks that held one."""
        blocks = np.flatnonzero(self._node_ids != _NO_NODE).astype(np.int32)
        self._node_ids[blocks] = _NO_NODE
        self._clear()
        return blocks

    def check_integrity(self, cached: Iterable[int], blank: Iterable[int]) -> None:
        """Assert the invariants, and that exactly the cached free blocks hold a content; O(blocks + nodes)."""
        assert self.holds(np.fromiter(cached, np.int32)).all(), "a cached block without content"
        assert not self.holds(np.fromiter(blank, np.int32)).any(), "a blank block with content"
        nodes = list(self._roots.values())
        assert all(root.key == salt for salt, root in self._roots.items()), "roots"
        num_present = 0
        for node in nodes:
            nodes += node.children.values()
            num_present += self._check_node(node)
        assert num_present == np.count_nonzero(self._node_ids != _NO_NODE), "a block whose node is gone"
        assert sorted([*(node.id for node in nodes), *self._unused_ids]) == list(range(len(self._nodes))), "node ids"

    def _check_node(self, node: PrefixNode) -> int:
        """Returns how many blocks the node has."""
        blocks = node.blocks[: node.num_blocks]
        present = blocks[blocks != _NO_BLOCK]
        assert self._nodes[node.id] is node, "node ids"
        assert node.num_present == len(present), "blocks of a node"
        assert node.children or (node.num_blocks and blocks[-1] != _NO_BLOCK), "a node that nothing needs"
        assert node.parent is None or node.tokens.startswith(node.key), "a node's key"
        assert len(node.tokens) == len(node.blocks) * self._block_bytes, "a node's tokens"
        assert (self._node_ids[present] == node.id).all(), "a block's node"
        assert len(node.hashes) <= node.num_blocks, "hashes without contents"
        assert np.array_equal(self._depths[present], node.start + np.flatnonzero(blocks != _NO_BLOCK)), "depths"
        for key, child in node.children.items():
            assert child.key == key, "a child's key"
            assert child.parent is node, "a child's parent"
            assert child.start == node.start + node.num_blocks, "where a child begins"
        return len(present)

    def _clear(self) -> None:
        # Identifies the time until the next flush; cursors of another era are void.
        self._era = object()
        # Replaced with each change.
        self.version = object()
        self._roots: dict[bytes, PrefixNode] = {}
        self._nodes: list[PrefixNode] = []
        self._unused_ids: list[int] = []
        if self._feed is not None:
            self._feed.on_cleared(self._nodes)

    def _resume(self, cursor: PrefixCursor) -> tuple[PrefixNode, int]:
        """The node that ends at the cursor, and its depth; the root if the node was cut since."""
        if cursor.node is not None and cursor.node.num_cuts == cursor.num_cuts:
            return cursor.node, cursor.depth
        root = self._roots.get(cursor.salt)
        if root is None:
            root = self._roots[cursor.salt] = self._add_node(
                None, cursor.salt, start=0, tokens=b"", blocks=NO_BLOCKS, num_present=0
            )
        return root, 0

    def _num_common(self, node: PrefixNode, tokens: bytearray, depth: int, max_blocks: int) -> int:
        """How many of a node's blocks match the tokens after the first `depth` blocks."""
        start = depth * self._block_bytes
        num_blocks = min(node.num_blocks, max_blocks - depth)
        if num_blocks == len(node.blocks) and tokens.startswith(node.tokens, start):
            return num_blocks
        num_tokens = num_blocks * self._block_size
        differs = np.frombuffer(node.tokens, _TOKEN_DTYPE, num_tokens) != np.frombuffer(
            tokens, _TOKEN_DTYPE, num_tokens, start
        )
        first = int(differs.argmax())
        return first // self._block_size if differs[first] else num_blocks

    def _hold(self, node: PrefixNode, first: int, blocks: BlockIds) -> list[BlockIds]:
        """Put blocks into a node from its content `first` on; returns those they replace."""
        place = node.blocks[first : first + len(blocks)]
        before = place[place != _NO_BLOCK]
        if self._feed is not None:
            self._feed.on_held(node, first, place == _NO_BLOCK)
        self._node_ids[before] = _NO_NODE
        node.num_present += len(blocks) - len(before)
        place[:] = blocks
        self._note_place(blocks, node, node.start + first)
        return [before] if before.size else []

    def _note_place(self, blocks: BlockIds, node: PrefixNode, start: int) -> None:
        self._node_ids[blocks] = node.id
        self._depths[blocks] = np.arange(start, start + len(blocks), dtype=np.int32)

    def _split(self, node: PrefixNode, num_blocks: int) -> PrefixNode:
        """Split off the first `num_blocks` contents into a new parent; returns the parent.

        The rest keeps its identity, so a cursor at the end of `node` stays valid.
        """
        assert node.parent is not None
        num_bytes = num_blocks * self._block_bytes
        blocks = node.blocks[:num_blocks].copy()
        present = blocks[blocks != _NO_BLOCK]
        head_tokens = node.tokens[:num_bytes]
        head = self._add_node(
            node.parent, node.key, start=node.start, tokens=head_tokens, blocks=blocks, num_present=len(present)
        )
        self._node_ids[present] = head.id
        node.tokens, node.blocks = node.tokens[num_bytes:], node.blocks[num_blocks:].copy()
        node.num_blocks -= num_blocks
        node.num_present -= len(present)
        node.start += num_blocks
        node.parent, node.key = head, node.tokens[: self._block_bytes]
        head.children[node.key] = node
        head.hashes, node.hashes = node.hashes[:num_blocks], node.hashes[num_blocks:]
        if self._feed is not None:
            self._feed.on_split(head)
        return head

    def _prune(self, node: PrefixNode | None) -> None:
        """Drop unneeded contents from the end of a node, then from its ancestors."""
        while node is not None and not node.children and not node.num_present:
            node.num_cuts += 1
            self._unused_ids.append(node.id)
            if node.parent is None:
                del self._roots[node.key]
            else:
                del node.parent.children[node.key]
            node = node.parent
        if node is not None and not node.children and node.blocks[node.num_blocks - 1] == _NO_BLOCK:
            node.num_blocks = int(np.flatnonzero(node.blocks[: node.num_blocks] != _NO_BLOCK)[-1]) + 1
            node.num_cuts += 1
            del node.hashes[node.num_blocks :]
            if 2 * node.num_blocks <= len(node.blocks):
                # Not every time: a long run shrinks block by block.
                node.blocks = node.blocks[: node.num_blocks].copy()
                node.tokens = node.tokens[: node.num_blocks * self._block_bytes]

    def _child(self, node: PrefixNode, tokens: bytearray, depth: int) -> PrefixNode | None:
        start = depth * self._block_bytes
        return node.children.get(bytes(tokens[start : start + self._block_bytes]))

    def _append(self, node: PrefixNode, tokens: bytearray, table: BlockIds, num_before: int) -> PrefixNode:
        """Append a sequence's contents: a short leaf is extended, any other node gets a child.

        Returns:
            The node that now ends with them; it has the blocks after the first `num_before`.
        """
        depth = node.start + node.num_blocks
        new_tokens = bytes(memoryview(tokens)[depth * self._block_bytes : len(table) * self._block_bytes])
        blocks = table[depth:].copy()
        num_gap = max(num_before - depth, 0)
        blocks[:num_gap] = _NO_BLOCK
        num_present = len(blocks) - num_gap
        if 0 < node.num_blocks <= _LONGEST_EXTENDED and not node.children:
            node.tokens = node.tokens[: node.num_blocks * self._block_bytes] + new_tokens
            node.blocks = np.concatenate([node.blocks[: node.num_blocks], blocks])
            node.num_blocks = len(node.blocks)
            node.num_present += num_present
            node.num_cuts += 1
        else:
            key = new_tokens[: self._block_bytes]
            node = self._add_node(node, key, start=depth, tokens=new_tokens, blocks=blocks, num_present=num_present)
        self._note_place(blocks[num_gap:], node, depth + num_gap)
        if self._feed is not None:
            self._feed.on_appended(node)
        return node

    def _add_node(
        self, parent: PrefixNode | None, key: bytes, *, start: int, tokens: bytes, blocks: BlockIds, num_present: int
    ) -> PrefixNode:
        node_id = self._unused_ids.pop() if self._unused_ids else len(self._nodes)
        node = PrefixNode(node_id, parent, key, start, tokens, blocks, len(blocks), num_present)
        if parent is not None:
            parent.children[key] = node
        if node_id == len(self._nodes):
            self._nodes.append(node)
        else:
            self._nodes[node_id] = node
        return node


def _num_before_hole(blocks: BlockIds) -> int:
    is_hole = blocks == _NO_BLOCK
    return int(is_hole.argmax()) if is_hole.any() else len(blocks)
