"""Which KV block holds which prefix: an index by chained hashes whose every hit is proven.

The hash finds a candidate. It is a hit only if the candidate's tokens are equal and its recorded parent is the
content matched just before: by induction the whole prefix is equal. A collision of the 64-bit hash, which an
attacker makes in under a second, then costs a miss and never a wrong block; comparing only the block's own
tokens, as nano-vLLM does, can be poisoned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

import numpy as np
from xxhash import xxh64_intdigest

from services.scheduler.free_blocks import NO_BLOCKS, BlockIds, as_block_ids

_NO_BLOCK = -1
_NO_CONTENT = -1
_MIN_NEW_ROWS = 256


class Era:
    """The time between two flushes of one cache; what belongs to another era is void."""


@dataclass(slots=True)
class PrefixChain:
    """How far a sequence's blocks are matched or published, from the first block on.

    Invariant: while its era lasts, `num_blocks` blocks hold contents, and `content` is that of the last of them.
    `hash` is that of the last block, the seed of the next one's.
    """

    era: Era | None = None
    salt: bytes = b""
    hash: int = 0
    num_blocks: int = 0
    content: int = _NO_CONTENT

    def copy(self) -> PrefixChain:
        """An equal chain that advances by itself."""
        return PrefixChain(self.era, self.salt, self.hash, self.num_blocks, self.content)


@dataclass(slots=True)
class PrefixMemo:
    """What the last look for a waiting sequence's prefix found: the next one only sees to what changed since.

    The lists and arrays are replaced, never changed.
    """

    chain: PrefixChain
    num_departures: int
    block_ids: list[int]
    block_array: BlockIds


class PrefixCache:
    """Finds blocks by the prefix they were computed under.

    A content is a pair of parent content and tokens; a root, the parent of first blocks, is a salt. Contents are
    interned: equal pairs are one content as long as a block holds it or a child names it, so a parent that was
    evicted and computed again is the old content, and its children are found again. A content is a row of columns,
    which are lists: nothing reads and writes single elements faster, and the loops below do little else.

    Invariant: an index entry names a content of that hash. A content's finder is the newest block that holds it,
    unless that block left the index. A content's references are the blocks that hold it and the contents that name
    it as parent; a row without any is unused. Where hashes collide the newest content has the entry, and the others
    have no finder. A block that left the index remembers when, counted in departures.

    A block's hash is `xxh64(tokens as little-endian int32, seed = the previous block's hash)`; the first block's seed
    is the hash of the salt, and 0 when there is none. DESIGN puts the previous hash in front of the tokens instead,
    which costs twice as much; what is found is proven either way.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._split = Struct(f"{block_bytes}s").iter_unpack
        self._num_departures = 0
        self._left_at = np.zeros(num_blocks, np.int64)
        self._clear()

    def find(self, memo: PrefixMemo | None, salt: bytes, *, tokens: memoryview) -> PrefixMemo:
        """Find the longest cached prefix of full blocks.

        Args:
            memo: What the last look found for the first of these tokens and this salt; it is changed. A void one
                does no harm, one of another cache neither.
            salt: Under which the blocks were computed.
            tokens: All that may be found, a multiple of the block size.
        """
        if memo is None or memo.chain.era is not self._era:
            memo = PrefixMemo(self._begin(salt), self._num_departures, [], NO_BLOCKS)
        elif memo.num_departures != self._num_departures:
            self._drop_departed(memo)
        more = self._extend(memo.chain, tokens[memo.chain.num_blocks * self._block_bytes :])
        if more:
            memo.block_ids = memo.block_ids + more
            memo.block_array = np.concatenate([memo.block_array, as_block_ids(more)])
        return memo

    def publish(self, chain: PrefixChain, block_table: list[int], *, tokens: bytearray, num_blocks: int) -> None:
        """Advance a chain to `num_blocks` blocks, none of which holds a content yet; they can be found from here on.

        The newest block of a content is the one that is found. On a chain of a past era nothing happens, since its
        parents are forgotten.

        Args:
            chain: Is changed.
            block_table: The sequence's blocks.
            tokens: What they hold, at least `num_blocks` blocks of it.
            num_blocks: More than the chain has.
        """
        if chain.era is not self._era:
            return
        if len(self._unused) <= num_blocks - chain.num_blocks:
            self._add_rows(num_blocks - chain.num_blocks + 1)
        index, unused, contents, finders = self._index, self._unused, self._block_contents, self._finders
        parents, content_tokens, hashes, refs = self._parents, self._tokens, self._hashes, self._refs
        block_hash, number = chain.hash, chain.num_blocks
        parent = chain.content if number else self._intern_root(chain.salt)
        for (block_tokens,) in self._split(tokens[number * self._block_bytes : num_blocks * self._block_bytes]):
            block_hash = xxh64_intdigest(block_tokens, block_hash)
            content = index.get(block_hash)
            if content is None or parents[content] != parent or content_tokens[content] != block_tokens:
                if content is not None:
                    self._lose_finder(content)
                index[block_hash] = content = unused.pop()
                parents[content] = parent
                content_tokens[content] = block_tokens
                hashes[content] = block_hash
                refs[content] = 1
                refs[parent] += 1
            else:
                self._lose_finder(content)
                refs[content] += 1
            block = block_table[number]
            number += 1
            finders[content] = block
            contents[block] = parent = content
        chain.num_blocks, chain.content, chain.hash = num_blocks, parent, block_hash

    def num_held(self, chain: PrefixChain) -> int:
        """How many of a sequence's blocks hold a content, the first ones; found by their hashes or not."""
        return chain.num_blocks if chain.era is self._era else 0

    def hide(self, block: int) -> None:
        """Take a block that holds a content out of the index: nobody finds it any more. It keeps the content."""
        content = self._block_contents[block]
        if self._finders[content] == block:
            self._lose_finder(content)

    def forget(self, blocks: BlockIds) -> None:
        """Take the contents of blocks away, because the blocks are reused."""
        index, unused, contents, finders = self._index, self._unused, self._block_contents, self._finders
        parents, hashes, refs = self._parents, self._hashes, self._refs
        for block in blocks.tolist():
            content = contents[block]
            contents[block] = _NO_CONTENT
            if finders[content] == block:
                finders[content] = _NO_BLOCK
            refs[content] -= 1
            # Nothing names the content any more; it goes, and then perhaps its parents.
            while not refs[content]:
                unused.append(content)
                parent = parents[content]
                if parent == _NO_CONTENT:
                    del self._roots[self._tokens[content]]
                    break
                owner = index.pop(hashes[content], content)
                if owner != content:
                    # A newer content of that hash; contents seldom collide, so one look-up does for the others.
                    index[hashes[content]] = owner
                refs[parent] -= 1
                content = parent
        self._num_departures += 1
        self._left_at[blocks] = self._num_departures

    def flush(self) -> BlockIds:
        """Forget all contents; nothing of chains that have begun can be found again.

        Returns:
            The blocks that could be found.
        """
        findable = as_block_ids([block for block in self._finders if block != _NO_BLOCK])
        self._clear()
        return findable

    def check_integrity(self, cached: Iterable[int], blank: Iterable[int]) -> None:
        """Assert the class's invariant, and that of the free blocks only the cached ones hold a content.

        Takes O(blocks + contents).
        """
        contents, parents, index = self._block_contents, self._parents, self._index
        assert all(contents[block] != _NO_CONTENT for block in cached), "a cached block without content"
        assert all(contents[block] == _NO_CONTENT for block in blank), "a blank block with content"
        used = [content for content, num_refs in enumerate(self._refs) if num_refs]
        named = Counter([*contents, *(parents[content] for content in used)])
        assert self._refs == [named[content] for content in range(len(parents))], "content references"
        assert sorted([*used, *self._unused]) == list(range(len(parents))), "a content that nothing names"
        roots = {self._tokens[content]: content for content in used if parents[content] == _NO_CONTENT}
        assert roots == self._roots, "roots"
        assert all(named[content] and self._hashes[content] == key for key, content in index.items()), "the index"
        for content, block in enumerate(self._finders):
            assert block == _NO_BLOCK or contents[block] == content, "a finder that holds another content"
            assert block == _NO_BLOCK or index.get(self._hashes[content]) == content, "a finder that is not found"

    def _clear(self) -> None:
        self._era = Era()
        self._index: dict[int, int] = {}
        self._roots: dict[bytes, int] = {}
        self._block_contents = [_NO_CONTENT] * self._num_blocks
        self._parents: list[int] = []
        self._tokens: list[bytes] = []
        self._hashes: list[int] = []
        self._finders: list[int] = []
        self._refs: list[int] = []
        self._unused: list[int] = []

    def _begin(self, salt: bytes) -> PrefixChain:
        return PrefixChain(self._era, salt, xxh64_intdigest(salt) if salt else 0)

    def _extend(self, chain: PrefixChain, tokens: memoryview) -> list[int]:
        """Find the next blocks of a chain, which advances, among those that would hold these tokens."""
        index, parents, content_tokens, finders = self._index, self._parents, self._tokens, self._finders
        # A root goes when nothing names it: each look begins with today's.
        parent = chain.content if chain.num_blocks else self._roots.get(chain.salt, _NO_CONTENT)
        last_hash = chain.hash
        blocks: list[int] = []
        for (block_tokens,) in self._split(tokens):
            block_hash = xxh64_intdigest(block_tokens, last_hash)
            content = index.get(block_hash)
            if content is None or parents[content] != parent or content_tokens[content] != block_tokens:
                break
            block = finders[content]
            if block == _NO_BLOCK:
                break
            blocks.append(block)
            parent, last_hash = content, block_hash
        if blocks:
            chain.num_blocks += len(blocks)
            chain.content, chain.hash = parent, last_hash
        return blocks

    def _drop_departed(self, memo: PrefixMemo) -> None:
        """Cut a memo before the first of its blocks that left the index since."""
        has_left = self._left_at[memo.block_array] > memo.num_departures
        memo.num_departures = self._num_departures
        if not has_left.any():
            return
        num_blocks = int(has_left.argmax())
        memo.block_ids, memo.block_array = memo.block_ids[:num_blocks], memo.block_array[:num_blocks]
        memo.chain = self._begin(memo.chain.salt)
        if num_blocks:
            content = self._block_contents[memo.block_ids[-1]]
            memo.chain.num_blocks, memo.chain.content = num_blocks, content
            memo.chain.hash = self._hashes[content]

    def _intern_root(self, salt: bytes) -> int:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = self._unused.pop()
            self._parents[root], self._tokens[root] = _NO_CONTENT, salt
        return root

    def _add_rows(self, num_rows: int) -> None:
        start = len(self._parents)
        num_rows = max(num_rows, _MIN_NEW_ROWS)
        self._parents += [_NO_CONTENT] * num_rows
        self._tokens += [b""] * num_rows
        self._hashes += [0] * num_rows
        self._finders += [_NO_BLOCK] * num_rows
        self._refs += [0] * num_rows
        # Popped from the end, the lowest number first.
        self._unused[:0] = range(start + num_rows - 1, start - 1, -1)

    def _lose_finder(self, content: int) -> None:
        """The block that is found for a content, if there is one, leaves the index."""
        block = self._finders[content]
        if block != _NO_BLOCK:
            self._finders[content] = _NO_BLOCK
            self._num_departures += 1
            self._left_at[block] = self._num_departures
