"""A feed reports what a prefix cache holds, however its tree changes between two slices."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.core.cache.block_hashes import hash_blocks, hash_salt
from services.scheduler.core.cache.cached_prefix import BlockIds
from services.scheduler.core.cache.kv_changes import KvChanges
from services.scheduler.core.cache.kv_feed import MAX_BLOCKS, KvFeed
from services.scheduler.core.cache.prefix_cache import PrefixCache
from tests.support.clients.kv_index import Block, KvIndex, Listener, held_blocks
from tests.support.scheduler.engine_driver import token_bytes

ALL = 10**9


def block_ids(*blocks: int) -> BlockIds:
    return np.array(blocks, np.int32)


def tokens_of(contents: str) -> bytearray:
    """The tokens of a chain: blocks of one token, one for each character."""
    return bytearray(token_bytes([ord(content) for content in contents]))


def hash_of(contents: str, salt: bytes = b"") -> int:
    """The hash of the last block of a chain."""
    return hash_blocks(hash_salt(salt), bytes(tokens_of(contents)), 4)[-1]


class Watched:
    """A cache of blocks of one token, and a listener that follows it from the start."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.cache = PrefixCache(num_blocks, 1)
        self.feed = KvFeed(4)
        self.cache.set_feed(self.feed)
        self.index = KvIndex()

    def publish(self, contents: str, *blocks: int, salt: bytes = b"") -> None:
        """Publish a chain from the root."""
        cursor = self.cache.find(salt, tokens_of(contents), max_blocks=0).cursor
        self.cache.publish(cursor, block_ids(*blocks), tokens=tokens_of(contents), num_blocks=len(contents))

    def forget(self, *blocks: int) -> None:
        """Remove the contents of blocks."""
        self.cache.forget(block_ids(*blocks))

    def take(self, *listeners: Listener) -> list[KvChanges]:
        """Deliver the changes to the listeners too; returns them."""
        taken = []
        while self.feed.has_changes:
            taken.append(self.feed.take())
            for index in (self.index, *(listener.index for listener in listeners)):
                index.apply(taken[-1])
        return taken

    def follow(self) -> set[int]:
        """Hash and deliver everything; returns the hashes known, which are those of the blocks that are held."""
        self.feed.advance(ALL)
        self.take()
        assert not self.feed.is_hashing
        assert self.index.blocks == held_blocks(self.cache, 1)
        return set(self.index.blocks)


def test_blocks_are_reported_with_the_block_before_them_and_their_place() -> None:
    watched = Watched()
    watched.publish("ab", 0, 1)
    watched.publish("a", 2, salt=b"s")
    watched.follow()
    assert watched.index.blocks == {
        hash_of("a"): Block(0, 0),
        hash_of("ab"): Block(hash_of("a"), 1),
        hash_of("a", b"s"): Block(hash_salt(b"s") or 0, 0),
    }


def test_what_goes_before_it_was_hashed_is_never_mentioned() -> None:
    watched = Watched()
    watched.publish("abc", 0, 1, 2)
    watched.feed.advance(1)
    watched.forget(2, 1)
    [changes] = watched.take()
    assert (changes.stored.hashes, changes.num_removed) == ([hash_of("a")], 0)
    assert watched.follow() == {hash_of("a")}


def test_a_content_that_moves_to_another_block_is_not_mentioned_and_one_that_returns_is() -> None:
    watched = Watched()
    watched.publish("abc", 0, 1, 2)
    watched.follow()
    watched.forget(1)
    assert watched.follow() == {hash_of("a"), hash_of("abc")}
    watched.publish("abc", 3, 4, 5)
    [changes] = watched.take()
    assert changes.stored.hashes == [hash_of("ab")]
    assert watched.follow() == {hash_of("a"), hash_of("ab"), hash_of("abc")}


def test_a_chain_leads_through_blocks_that_are_not_held() -> None:
    watched = Watched()
    watched.publish("abcd", 0, 1, 2, 3)
    watched.forget(0, 2)
    watched.follow()
    assert watched.index.blocks == {hash_of("ab"): Block(hash_of("a"), 1), hash_of("abcd"): Block(hash_of("abc"), 3)}


def test_a_removal_and_a_later_return_are_applied_in_order() -> None:
    watched = Watched()
    watched.publish("ab", 0, 1)
    watched.follow()
    watched.forget(0)
    watched.publish("ab", 2, 3)
    watched.forget(2)
    watched.publish("ab", 4, 5)
    assert len(watched.take()) > 1
    assert watched.follow() == {hash_of("a"), hash_of("ab")}


def test_a_node_that_is_split_before_it_is_hashed_and_goes_leaves_its_head_reported() -> None:
    watched = Watched()
    watched.publish("abcd", 0, 1, 2, 3)
    watched.publish("abx", 4, 5, 6)
    watched.forget(3, 2)
    watched.forget(6)
    assert watched.follow() == {hash_of("a"), hash_of("ab")}


def test_a_cut_node_that_grows_differently_gets_new_hashes() -> None:
    watched = Watched()
    watched.publish("abc", 0, 1, 2)
    watched.follow()
    watched.forget(2)
    watched.publish("abz", 3, 4, 5)
    assert watched.follow() == {hash_of("a"), hash_of("ab"), hash_of("abz")}


def test_a_flush_drops_what_was_not_taken() -> None:
    watched = Watched()
    watched.publish("abc", 0, 1, 2)
    watched.feed.advance(ALL)
    watched.cache.flush()
    assert not watched.feed.is_hashing
    [changes] = watched.take()
    assert (changes.is_cleared, changes.num_blocks) == (True, 0)
    assert watched.follow() == set()
    watched.publish("x", 0)
    assert watched.follow() == {hash_of("x")}


def test_no_slice_hashes_more_than_it_may() -> None:
    watched = Watched()
    watched.publish("abcdefgh", *range(8))
    watched.publish("abcxyz", *range(8, 14))
    sizes = []
    while watched.feed.is_hashing:
        watched.feed.advance(3)
        sizes.append(sum(len(changes.stored.hashes) for changes in watched.take()))
    assert max(sizes) == 3
    assert sum(sizes) == 11
    watched.follow()


def test_a_long_removal_is_reported_in_parts() -> None:
    num_blocks = 2 * MAX_BLOCKS + 1
    watched = Watched(num_blocks)
    contents = "".join(map(chr, range(1, num_blocks + 1)))
    watched.publish(contents, *range(num_blocks))
    watched.follow()
    watched.forget(*range(num_blocks))
    assert [changes.num_removed for changes in watched.take()] == [MAX_BLOCKS, MAX_BLOCKS, 1]
    assert watched.follow() == set()


@pytest.mark.parametrize("step", range(1, 12))
def test_a_scan_misses_nothing_when_nodes_are_split_under_it(step: int) -> None:
    watched = Watched()
    # The number of a node that went is used again for the head of the next split.
    watched.publish("q", 20)
    watched.publish("abcdef", 0, 1, 2, 3, 4, 5)
    watched.publish("ghi", 6, 7, 8)
    watched.follow()
    listener = Listener(watched.feed)
    watched.forget(20)
    listener.advance(step)
    watched.publish("abx", 10, 11, 12)
    watched.publish("gx", 13, 14)
    watched.forget(13, 6)
    while not listener.scan.is_done or watched.feed.is_hashing:
        watched.feed.advance(2)
        watched.take(listener)
        listener.advance(2)
        assert listener.index.blocks.items() <= held_blocks(watched.cache, 1).items()
    assert listener.index.blocks == held_blocks(watched.cache, 1) == watched.index.blocks


def test_a_scan_begins_again_after_a_flush() -> None:
    watched = Watched()
    watched.publish("abc", 0, 1, 2)
    watched.follow()
    listener = Listener(watched.feed)
    listener.advance(2)
    watched.cache.flush()
    watched.take(listener)
    watched.publish("x", 0)
    listener.advance(ALL)
    watched.feed.advance(ALL)
    watched.take(listener)
    assert set(listener.index.blocks) == watched.follow() == {hash_of("x")}


def test_a_feed_that_comes_late_knows_what_was_held_before() -> None:
    watched = Watched()
    watched.publish("abc", 0, 1, 2)
    watched.follow()
    watched.cache.set_feed(None)
    watched.publish("abxy", 3, 4, 5, 6)
    watched.forget(2)
    watched.feed = KvFeed(4)
    watched.cache.set_feed(watched.feed)
    listener = Listener(watched.feed)
    while not listener.scan.is_done:
        listener.advance(1)
        watched.take(listener)
    assert listener.index.blocks == held_blocks(watched.cache, 1)
    assert len(listener.index.blocks) == 4
