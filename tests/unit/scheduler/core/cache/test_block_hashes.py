"""The hashes of blocks, beside a second implementation of XXH64."""

from __future__ import annotations

import random

import pytest
from xxhash import xxh64_intdigest

from services.scheduler.core.cache.block_hashes import hash_blocks, hash_salt
from tests.support.scheduler.engine_driver import token_bytes
from tests.support.scheduler.reference_xxh64 import xxh64

# From xxHash's own sanity checks.
KNOWN = {b"": 0xEF46DB3751D8E999, b"a": 0xD24EC4F1A98C6E5B, b"abc": 0x44BC2CF5AD770999}


def little(value: int) -> bytes:
    return value.to_bytes(8, "little")


def test_the_second_implementation_is_xxh64() -> None:
    assert {data: xxh64(data) for data in KNOWN} == KNOWN
    source = random.Random(0)
    for size in [*range(100), 1000]:
        data = source.randbytes(size)
        assert xxh64(data) == xxh64_intdigest(data)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("salt", [b"", b"tenant"])
def test_a_chain_is_that_of_its_definition(block_size: int, salt: bytes) -> None:
    source = random.Random(block_size)
    tokens = token_bytes([source.randrange(200_000) for _ in range(5 * block_size)])
    before = little(xxh64(salt)) if salt else b""
    expected = []
    for start in range(0, len(tokens), 4 * block_size):
        expected.append(xxh64(before + tokens[start : start + 4 * block_size]))
        before = little(expected[-1])
    hashes = hash_blocks(hash_salt(salt), tokens, 4 * block_size)
    assert hashes == expected
    assert hash_blocks(hashes[1], tokens[2 * 4 * block_size :], 4 * block_size) == expected[2:]


def test_tokens_salts_and_places_all_count() -> None:
    tokens = token_bytes(list(range(32)))
    other = token_bytes([*range(31), 99])
    assert hash_blocks(None, tokens, 64)[0] == hash_blocks(None, other, 64)[0]
    assert hash_blocks(None, tokens, 64)[1] != hash_blocks(None, other, 64)[1]
    same_twice = token_bytes([5] * 32)
    chains = [hash_blocks(hash_salt(salt), same_twice, 64) for salt in (b"", b"a", b"b")]
    assert len({block_hash for chain in chains for block_hash in chain}) == 6
    assert hash_salt(b"") is None
