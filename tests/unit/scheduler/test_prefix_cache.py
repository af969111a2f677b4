"""Hits are proven: neither a collision of hashes nor an evicted parent leads to a wrong block."""

from __future__ import annotations

from xxhash import xxh64_intdigest

from services.scheduler.free_blocks import as_block_ids
from services.scheduler.prefix_cache import PrefixCache, PrefixChain, PrefixMemo
from tests.support.engine_driver import token_bytes

BLOCK_SIZE = 16

# Two blocks of valid token ids whose xxh64 is equal (RELIABILITY 1F); an attacker makes such a pair in 0.2 s.
COLLIDING_A = [151814, 50499, *range(1002, 1008), 9183, 117423, *range(1010, 1016)]
COLLIDING_B = [96829, 44660, *range(1002, 1008), 0, 0, *range(1010, 1016)]


def make_cache(num_blocks: int = 8) -> PrefixCache:
    return PrefixCache(num_blocks, BLOCK_SIZE * 4)


def block_of(start: int) -> list[int]:
    return list(range(start, start + BLOCK_SIZE))


def concat(blocks: tuple[list[int], ...]) -> bytes:
    return token_bytes([token for block in blocks for token in block])


def find(cache: PrefixCache, *blocks: list[int], salt: bytes = b"", memo: PrefixMemo | None = None) -> PrefixMemo:
    """Look for a chain of full blocks."""
    return cache.find(memo, salt, tokens=memoryview(concat(blocks)))


def match(cache: PrefixCache, *blocks: list[int], salt: bytes = b"") -> list[int]:
    """The blocks found for a chain of full blocks."""
    return find(cache, *blocks, salt=salt).block_ids


def publish(cache: PrefixCache, *blocks: tuple[int, list[int]], salt: bytes = b"") -> PrefixChain:
    """Publish a chain of (block, tokens) from the root, as if nothing of it had been found."""
    chain = find(cache, salt=salt).chain
    table, tokens = [block for block, _ in blocks], concat(tuple(tokens for _, tokens in blocks))
    cache.publish(chain, table, tokens=bytearray(tokens), num_blocks=len(blocks))
    cache.check_integrity([], [])
    return chain


def forget(cache: PrefixCache, *blocks: int) -> None:
    cache.forget(as_block_ids([*blocks]))
    cache.check_integrity([], [])


def test_the_hash_of_a_block_is_the_seed_of_the_next_ones() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)), (1, block_of(100)))
    first = xxh64_intdigest(token_bytes(block_of(1)))
    second = xxh64_intdigest(token_bytes(block_of(100)), first)
    assert find(cache, block_of(1)).chain.hash == first
    assert find(cache, block_of(1), block_of(100)).chain.hash == second
    assert find(cache, block_of(1), block_of(7)).chain.hash == first


def test_the_hash_of_the_salt_is_the_seed_of_the_first_blocks() -> None:
    cache = make_cache()
    chain = publish(cache, (0, block_of(1)), salt=b"tenant")
    assert chain.hash == xxh64_intdigest(token_bytes(block_of(1)), xxh64_intdigest(b"tenant"))


def test_the_first_miss_makes_all_later_blocks_misses() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)), (1, block_of(2)), (2, block_of(3)))
    assert match(cache, block_of(1), block_of(2), block_of(3)) == [0, 1, 2]
    assert match(cache, block_of(1), block_of(9), block_of(3)) == [0]
    assert match(cache, block_of(2)) == []


def test_a_collision_costs_a_miss_and_never_a_wrong_block() -> None:
    assert xxh64_intdigest(token_bytes(COLLIDING_A)) == xxh64_intdigest(token_bytes(COLLIDING_B))
    cache = make_cache()
    publish(cache, (0, COLLIDING_A))
    assert match(cache, COLLIDING_B) == []
    publish(cache, (1, COLLIDING_B))
    assert match(cache, COLLIDING_B) == [1]
    assert match(cache, COLLIDING_A) == []


def test_a_child_is_not_found_under_a_parent_whose_hash_collides() -> None:
    # The poisoning of RELIABILITY 1F: equal own tokens, equal hashes, another parent.
    cache = make_cache()
    publish(cache, (0, COLLIDING_A), (1, block_of(1)))
    publish(cache, (2, COLLIDING_B))
    assert match(cache, COLLIDING_B, block_of(1)) == [2]


def test_whatever_collided_leaves_the_books_in_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)):
        cache = make_cache()
        publish(cache, (0, COLLIDING_A))
        publish(cache, (1, COLLIDING_B))
        publish(cache, (2, COLLIDING_A))
        for block in order:
            forget(cache, block)
        publish(cache, (3, COLLIDING_B))
        assert match(cache, COLLIDING_B) == [3]


def test_different_salts_share_nothing() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)))
    publish(cache, (1, block_of(1)), salt=b"a")
    publish(cache, (2, block_of(1)), salt=b"b")
    assert [match(cache, block_of(1), salt=salt) for salt in (b"", b"a", b"b", b"c")] == [[0], [1], [2], []]


def test_salts_whose_hashes_collide_share_nothing() -> None:
    cache = make_cache()
    salt, twin = token_bytes(COLLIDING_A), token_bytes(COLLIDING_B)
    publish(cache, (0, block_of(1)), (1, block_of(2)), salt=salt)
    assert match(cache, block_of(1), block_of(2), salt=twin) == []
    publish(cache, (2, block_of(1)), salt=twin)
    assert match(cache, block_of(1), block_of(2), salt=twin) == [2]


def test_a_salt_that_nothing_names_is_forgotten_and_begins_anew() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)), salt=b"a")
    memo = find(cache, block_of(9), salt=b"a")
    forget(cache, 0)
    # Its row is used again; a chain that began before must not begin under it.
    publish(cache, (1, block_of(1)), salt=b"b")
    cache.publish(memo.chain, [2], tokens=bytearray(token_bytes(block_of(9))), num_blocks=1)
    cache.check_integrity([], [])
    assert match(cache, block_of(9), salt=b"a") == [2]
    assert match(cache, block_of(9), salt=b"b") == []


def test_a_parent_computed_again_finds_its_children_again() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)), (1, block_of(2)))
    forget(cache, 0)
    assert match(cache, block_of(1), block_of(2)) == []
    publish(cache, (5, block_of(1)))
    assert match(cache, block_of(1), block_of(2)) == [5, 1]


def test_a_content_that_nobody_names_is_dropped_with_its_parents() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)), (1, block_of(2)), (2, block_of(3)))
    for block in (0, 1, 2):
        forget(cache, block)
    publish(cache, (3, block_of(1)))
    assert match(cache, block_of(1), block_of(2)) == [3]


def test_the_newest_block_of_a_content_wins_and_an_older_one_leaves_its_entry_alone() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)))
    publish(cache, (1, block_of(1)))
    assert match(cache, block_of(1)) == [1]
    forget(cache, 0)
    assert match(cache, block_of(1)) == [1]
    forget(cache, 1)
    assert match(cache, block_of(1)) == []


def test_a_hidden_block_is_not_found_but_keeps_its_content() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)), (1, block_of(2)))
    cache.hide(0)
    cache.check_integrity([0, 1], [])
    assert match(cache, block_of(1)) == []
    publish(cache, (2, block_of(1)))
    assert match(cache, block_of(1), block_of(2)) == [2, 1]


def test_nothing_from_before_a_flush_is_found_nor_what_is_computed_after_it() -> None:
    cache = make_cache()
    chain = publish(cache, (0, block_of(1)), (1, block_of(2)))
    assert sorted(cache.flush().tolist()) == [0, 1]
    assert cache.num_held(chain) == 0
    tokens = bytearray(concat((block_of(1), block_of(2), block_of(3))))
    cache.publish(chain, [0, 1, 2], tokens=tokens, num_blocks=3)
    publish(cache, (4, block_of(1)), (5, block_of(2)))
    cache.check_integrity([4, 5], [0, 1, 2])
    assert match(cache, block_of(1), block_of(2), block_of(3)) == [4, 5]


def test_a_memo_grows_with_what_is_published_and_shrinks_with_what_leaves() -> None:
    cache = make_cache()
    blocks = (block_of(1), block_of(2), block_of(3))
    memo = find(cache, *blocks)
    publish(cache, (0, block_of(1)), (1, block_of(2)), (2, block_of(3)))
    memo = find(cache, *blocks, memo=memo)
    assert memo.block_ids == memo.block_array.tolist() == [0, 1, 2]
    forget(cache, 1)
    memo = find(cache, *blocks, memo=memo)
    assert memo.block_ids == memo.block_array.tolist() == [0]
    assert memo.chain == find(cache, *blocks).chain
    # The block that was reused has a content again, another one.
    publish(cache, (1, block_of(7)))
    assert find(cache, *blocks, memo=memo).block_ids == [0]
    publish(cache, (3, block_of(1)), (4, block_of(2)))
    assert find(cache, *blocks, memo=memo).block_ids == [3, 4, 2]


def test_a_memo_of_another_cache_or_from_before_a_flush_is_void() -> None:
    cache, other = make_cache(), make_cache()
    for each in (cache, other):
        publish(each, (0, block_of(1)))
    assert find(other, block_of(1), block_of(2), memo=find(cache, block_of(1))).chain == find(other, block_of(1)).chain
    memo = find(cache, block_of(1))
    cache.flush()
    assert find(cache, block_of(1), memo=memo).block_ids == []
