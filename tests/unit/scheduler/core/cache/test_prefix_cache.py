"""However nodes are published, split, displaced and forgotten, a prefix is found only under its own tokens and salt."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.cache.cached_prefix import BlockIds, CachedPrefix, PrefixCursor
from services.scheduler.core.cache.prefix_cache import PrefixCache
from tests.support.scheduler.engine_driver import token_bytes

BLOCK_SIZE = 16


def make_cache(num_blocks: int = 32) -> PrefixCache:
    return PrefixCache(num_blocks, BLOCK_SIZE)


def block_ids(*blocks: int) -> BlockIds:
    return np.array(blocks, np.int32)


def tokens_of(contents: str) -> bytearray:
    """The tokens of a chain: one block per character."""
    return bytearray(token_bytes([ord(content) * 1000 + index for content in contents for index in range(BLOCK_SIZE)]))


def find(cache: PrefixCache, contents: str, salt: bytes = b"") -> CachedPrefix:
    return cache.find(salt, tokens_of(contents), max_blocks=len(contents))


def match(cache: PrefixCache, contents: str, salt: bytes = b"") -> list[int]:
    """The blocks found for a chain."""
    prefix = find(cache, contents, salt)
    assert prefix.num_tokens == BLOCK_SIZE * prefix.cursor.num_blocks == BLOCK_SIZE * len(prefix.block_ids)
    return list(prefix.block_ids.tolist())


def publish(
    cache: PrefixCache, contents: str, *blocks: int, cursor: PrefixCursor | None = None, salt: bytes = b""
) -> list[int]:
    """Publish a chain after a cursor, or from the root without one; returns the blocks that lost their contents."""
    cursor = find(cache, "", salt).cursor if cursor is None else cursor
    displaced = cache.publish(cursor, block_ids(*blocks), tokens=tokens_of(contents), num_blocks=len(contents))
    assert cursor.num_blocks == len(contents)
    check(cache)
    return list(displaced.tolist())


def forget(cache: PrefixCache, *blocks: int) -> None:
    cache.forget(block_ids(*blocks))
    check(cache)


def check(cache: PrefixCache) -> None:
    cache.check_integrity([], [])


def test_all_blocks_after_the_first_miss_are_misses() -> None:
    cache = make_cache()
    publish(cache, "abc", 0, 1, 2)
    assert match(cache, "abc") == [0, 1, 2]
    assert match(cache, "abcd") == [0, 1, 2]
    assert match(cache, "ab") == [0, 1]
    assert match(cache, "axc") == [0]
    assert match(cache, "bc") == []
    assert match(cache, "") == []


def test_a_block_that_differs_in_its_last_token_is_a_miss() -> None:
    cache = make_cache()
    publish(cache, "ab", 0, 1)
    for position in (0, 15, 16, 31):
        tokens = tokens_of("ab")
        tokens[4 * position] ^= 1
        assert cache.find(b"", tokens, max_blocks=2).block_ids.tolist() == [0][: position // 16]


def test_chains_that_diverge_share_their_common_prefix() -> None:
    cache = make_cache()
    publish(cache, "abcd", 0, 1, 2, 3)
    cursor = find(cache, "abxy").cursor
    assert publish(cache, "abxy", 0, 1, 4, 5, cursor=cursor) == []
    assert match(cache, "abcd") == [0, 1, 2, 3]
    assert match(cache, "abxy") == [0, 1, 4, 5]
    cursor = find(cache, "az").cursor
    publish(cache, "az", 0, 6, cursor=cursor)
    assert [match(cache, contents) for contents in ("abcd", "abxy", "az")] == [[0, 1, 2, 3], [0, 1, 4, 5], [0, 6]]


def test_a_chain_grows_after_what_was_found_and_what_was_published() -> None:
    cache = make_cache()
    publish(cache, "ab", 0, 1)
    cursor = find(cache, "abcd").cursor
    publish(cache, "abc", 0, 1, 2, cursor=cursor)
    publish(cache, "abcd", 0, 1, 2, 3, cursor=cursor)
    assert match(cache, "abcde") == [0, 1, 2, 3]


def test_a_cursor_survives_a_split_before_it() -> None:
    cache = make_cache()
    cursor = find(cache, "").cursor
    publish(cache, "abcd", 0, 1, 2, 3, cursor=cursor)
    publish(cache, "axcd", 4, 5, 6, 7)
    publish(cache, "abxd", 8, 9, 10, 11)
    publish(cache, "abcdef", 0, 1, 2, 3, 12, 13, cursor=cursor)
    # The newest block with these contents is found.
    assert match(cache, "abcdef") == [8, 9, 2, 3, 12, 13]
    assert match(cache, "axcd") == [8, 5, 6, 7]


def test_different_salts_share_nothing() -> None:
    cache = make_cache()
    publish(cache, "a", 0)
    publish(cache, "a", 1, salt=b"a")
    publish(cache, "a", 2, salt=b"b")
    assert [match(cache, "a", salt) for salt in (b"", b"a", b"b", b"c")] == [[0], [1], [2], []]


def test_an_unused_salt_is_forgotten_and_can_be_used_again() -> None:
    cache = make_cache()
    publish(cache, "a", 0, salt=b"s")
    cursor = find(cache, "z", b"s").cursor
    forget(cache, 0)
    publish(cache, "a", 1, salt=b"t")
    publish(cache, "z", 2, cursor=cursor)
    assert (match(cache, "z", b"s"), match(cache, "z", b"t"), match(cache, "a", b"t")) == ([2], [], [1])


def test_a_recomputed_head_leads_to_the_remaining_tails() -> None:
    cache = make_cache()
    publish(cache, "abcd", 0, 1, 2, 3)
    forget(cache, 0, 2)
    assert match(cache, "abcd") == []
    publish(cache, "a", 5)
    assert match(cache, "abcd") == [5, 1]
    publish(cache, "abc", 6, 7, 8)
    assert match(cache, "abcd") == [6, 7, 8, 3]


def test_unused_nodes_are_dropped() -> None:
    cache = make_cache()
    publish(cache, "abc", 0, 1, 2)
    publish(cache, "abx", 3, 4, 5)
    forget(cache, 4, 3)
    forget(cache, 2)
    publish(cache, "ab", 6, 7)
    assert (match(cache, "abc"), match(cache, "abx")) == ([6, 7], [6, 7, 5])
    forget(cache, 5, 7, 6)
    assert match(cache, "abx") == []
    assert cache.flush().size == 0


def test_the_newest_block_with_the_same_contents_wins_and_the_older_one_is_blank() -> None:
    cache = make_cache()
    publish(cache, "ab", 0, 1)
    assert publish(cache, "ab", 2, 3) == [0, 1]
    assert match(cache, "ab") == [2, 3]
    assert cache.holds(block_ids(0, 1, 2, 3)).tolist() == [False, False, True, True]
    forget(cache, 2, 3)
    assert match(cache, "ab") == []


def test_a_chain_within_another_replaces_its_blocks() -> None:
    cache = make_cache()
    publish(cache, "abcd", 0, 1, 2, 3)
    cursor = find(cache, "ab").cursor
    assert publish(cache, "abc", 0, 1, 4, cursor=cursor) == [2]
    assert match(cache, "abcd") == [0, 1, 4, 3]
    publish(cache, "abcx", 0, 1, 4, 5, cursor=cursor)
    assert (match(cache, "abcd"), match(cache, "abcx")) == ([0, 1, 4, 3], [0, 1, 4, 5])


def test_a_long_chain_is_forgotten_block_by_block_from_its_end_and_can_be_published_again() -> None:
    cache = make_cache()
    contents = "abcdefghij"
    publish(cache, contents, *range(10))
    for num_left in range(9, 0, -1):
        forget(cache, num_left)
        assert match(cache, contents) == [*range(num_left)]
    publish(cache, contents, 0, *range(11, 20), cursor=find(cache, contents).cursor)
    assert match(cache, contents) == [0, *range(11, 20)]


def test_a_cursor_whose_blocks_were_displaced_and_reused_continues_after_a_gap() -> None:
    cache = make_cache()
    cursor = find(cache, "").cursor
    publish(cache, "ab", 0, 1, cursor=cursor)
    # Another sequence computed the same, and its blocks were reused.
    publish(cache, "ab", 2, 3)
    forget(cache, 3, 2)
    publish(cache, "abcd", 0, 1, 4, 5, cursor=cursor)
    # Blocks that it published before are not published again: they may have been hidden for a reason.
    assert match(cache, "abcd") == []
    publish(cache, "ab", 6, 7)
    assert match(cache, "abcd") == [6, 7, 4, 5]


def test_a_found_prefix_does_not_change_with_the_cache() -> None:
    cache = make_cache()
    publish(cache, "abc", 0, 1, 2)
    prefix = find(cache, "abc")
    assert prefix.version is cache.version
    publish(cache, "ab", 3, 4)
    forget(cache, 2)
    assert prefix.block_ids.tolist() == [0, 1, 2]
    assert prefix.version is not cache.version


def test_neither_blocks_from_before_a_flush_nor_later_ones_of_their_sequences_are_found() -> None:
    cache = make_cache()
    cursor = find(cache, "").cursor
    publish(cache, "ab", 0, 1, cursor=cursor)
    assert sorted(cache.flush().tolist()) == [0, 1]
    assert not cache.holds(block_ids(0, 1)).any()
    displaced = cache.publish(cursor, block_ids(0, 1, 2), tokens=tokens_of("abc"), num_blocks=3)
    assert displaced.size == 0
    publish(cache, "ab", 4, 5)
    cache.check_integrity([4, 5], [0, 1, 2])
    assert match(cache, "abc") == [4, 5]


def test_a_cursor_of_another_cache_publishes_nothing() -> None:
    cache, other = make_cache(), make_cache()
    cursor = find(cache, "").cursor
    publish(cache, "a", 0, cursor=cursor)
    assert other.publish(cursor, block_ids(0, 1), tokens=tokens_of("ab"), num_blocks=2).size == 0
    assert match(other, "ab") == []


def test_block_size_one_distinguishes_tokens() -> None:
    cache = PrefixCache(64, 1)
    tokens = bytearray(token_bytes([*range(40)]))
    cache.publish(
        cache.find(b"", tokens, max_blocks=0).cursor, np.arange(40, dtype=np.int32), tokens=tokens, num_blocks=40
    )
    other = bytearray(token_bytes([*range(23), 7, *range(24, 40)]))
    assert cache.find(b"", other, max_blocks=40).block_ids.tolist() == [*range(23)]
