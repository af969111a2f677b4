"""Which KV block holds which prefix: an index by chained hashes whose every hit is proven.

The hash finds a candidate. It is a hit only if the candidate's tokens are equal and its recorded parent is the
content matched just before: by induction the whole prefix is equal. A collision of the 64-bit hash, which an
attacker makes in under a second, then costs a miss and never a wrong block; comparing only the block's own
tokens, as nano-vLLM does, can be poisoned.
"""

from __future__ import annotations

from dataclasses import dataclass

from xxhash import xxh64_intdigest

ROOT = 0

_ID_BYTES = 8


@dataclass(slots=True)
class PrefixChain:
    """How far a sequence's blocks are matched or published, from the first block on."""

    num_blocks: int = 0
    content_id: int = ROOT
    digest: bytes = b""

    def advance(self, content_id: int, block_hash: int) -> None:
        """Take in the next full block."""
        self.num_blocks += 1
        self.content_id = content_id
        self.digest = block_hash.to_bytes(_ID_BYTES, "little")


class PrefixCache:
    """Finds blocks by the prefix they were computed under.

    A content is a pair of parent content and tokens. Contents are interned: equal pairs have one id as long as a
    block holds it or a child names it, so a parent that was evicted and computed again gets its old id, and its
    children are found again. The key of a content is its parent's id followed by its tokens, as bytes.

    Invariant: an index entry names a block that holds a content of that hash; a content's references are the
    blocks that hold it and the contents that name it as parent.

    A block's hash is `xxh64(previous hash as 8 little-endian bytes, tokens as little-endian int32)`, the first
    block's that of its tokens alone. Source: DESIGN, after nano-vLLM's and vLLM's chained block hashes.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._index: dict[int, int] = {}
        self._block_content = [ROOT] * num_blocks
        self._block_hash = [0] * num_blocks
        self._content_ids: dict[bytes, int] = {}
        self._content_keys: dict[int, bytes] = {}
        self._content_refs: dict[int, int] = {}
        self._next_content_id = ROOT + 1

    def match(self, tokens: bytes | bytearray, max_blocks: int) -> tuple[list[int], PrefixChain]:
        """Find the longest cached prefix of `tokens`, at most `max_blocks` blocks long.

        Returns:
            The blocks in order, and the chain up to the last of them.
        """
        width = self._block_bytes
        chain = PrefixChain()
        blocks: list[int] = []
        for start in range(0, max_blocks * width, width):
            block_tokens = bytes(tokens[start : start + width])
            block_hash = xxh64_intdigest(chain.digest + block_tokens)
            block = self._index.get(block_hash)
            if block is None:
                break
            content_id = self._block_content[block]
            if self._content_keys[content_id] != chain.content_id.to_bytes(_ID_BYTES, "little") + block_tokens:
                break
            blocks.append(block)
            chain.advance(content_id, block_hash)
        return blocks, chain

    def publish(self, block: int, chain: PrefixChain, block_tokens: bytes) -> None:
        """Enter a full block that no entry names yet, as the next of `chain`, which advances.

        The newest block of a content wins in the index.
        """
        assert self._block_content[block] == ROOT, "published twice"
        content_id = self._intern(chain.content_id, block_tokens)
        self._content_refs[content_id] += 1
        block_hash = xxh64_intdigest(chain.digest + block_tokens)
        self._index[block_hash] = block
        self._block_content[block] = content_id
        self._block_hash[block] = block_hash
        chain.advance(content_id, block_hash)

    def holds(self, block: int) -> bool:
        """Whether the block holds a content, found by its hash or not."""
        return self._block_content[block] != ROOT

    def hide(self, block: int) -> None:
        """Take a block out of the index: nobody finds it any more. It keeps its content until `forget`."""
        if self.holds(block) and self._index.get(self._block_hash[block]) == block:
            del self._index[self._block_hash[block]]

    def forget(self, block: int) -> None:
        """Take a block's content away, because the block is reused."""
        self.hide(block)
        content_id = self._block_content[block]
        self._block_content[block] = ROOT
        self._release(content_id)

    def check_integrity(self) -> None:
        """Assert the class's invariant; O(blocks + contents)."""
        refs = dict.fromkeys(self._content_keys, 0)
        for content_id in self._block_content:
            if content_id != ROOT:
                refs[content_id] += 1
        for key in self._content_ids:
            parent_id = _parent_of(key)
            if parent_id != ROOT:
                refs[parent_id] += 1
        assert refs == self._content_refs, "content references"
        assert all(refs.values()), "a content that nobody names"
        assert {key: content_id for content_id, key in self._content_keys.items()} == self._content_ids, "interning"
        for block_hash, block in self._index.items():
            assert self._block_content[block] != ROOT, "an entry without content"
            assert self._block_hash[block] == block_hash, "an entry under another hash"

    def _intern(self, parent_id: int, block_tokens: bytes) -> int:
        key = parent_id.to_bytes(_ID_BYTES, "little") + block_tokens
        content_id = self._content_ids.get(key)
        if content_id is None:
            content_id = self._next_content_id
            self._next_content_id += 1
            self._content_ids[key] = content_id
            self._content_keys[content_id] = key
            self._content_refs[content_id] = 0
            if parent_id != ROOT:
                self._content_refs[parent_id] += 1
        return content_id

    def _release(self, content_id: int) -> None:
        while content_id != ROOT:
            self._content_refs[content_id] -= 1
            if self._content_refs[content_id]:
                return
            del self._content_refs[content_id]
            key = self._content_keys.pop(content_id)
            del self._content_ids[key]
            content_id = _parent_of(key)


def _parent_of(key: bytes) -> int:
    return int.from_bytes(key[:_ID_BYTES], "little")
