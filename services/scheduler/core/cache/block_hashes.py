"""The hashes by which outsiders name KV blocks; inside, blocks are found by their tokens.

    hash of a block    xxh64(hash of the block before it, as 8 little-endian bytes ‖ its token ids as int32)
    the first block    has the salt's hash, xxh64(salt), before it, and nothing when the salt is empty

Token ids are little-endian. The seed is 0. A hash names a block's tokens and all tokens before them. Two blocks with
one hash can be made on purpose, so a hash proves nothing.

Source: ATOM's block manager; XXH64 as in xxHash's specification, https://github.com/Cyan4973/xxHash.
"""

from __future__ import annotations

from xxhash import xxh64_intdigest

HASH_BYTES = 8


def hash_salt(salt: bytes) -> int | None:
    """What the first block has in place of the hash of a block before it; None without a salt."""
    return xxh64_intdigest(salt) if salt else None


def hash_blocks(parent: int | None, tokens: bytes, block_bytes: int) -> list[int]:
    """The hashes of consecutive blocks.

    Args:
        parent: The hash of the block before them; None when there is nothing.
        tokens: Theirs, as little-endian int32; a whole number of blocks.
        block_bytes: The size of one block's tokens.
    """
    hashes = []
    before = b"" if parent is None else parent.to_bytes(HASH_BYTES, "little")
    for start in range(0, len(tokens), block_bytes):
        block_hash = xxh64_intdigest(before + tokens[start : start + block_bytes])
        hashes.append(block_hash)
        before = block_hash.to_bytes(HASH_BYTES, "little")
    return hashes
