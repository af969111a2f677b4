"""Hits are proven: neither a collision of hashes nor an evicted parent leads to a wrong block."""

from __future__ import annotations

from xxhash import xxh64_intdigest

from services.scheduler.prefix_cache import PrefixCache, PrefixChain
from tests.support.engine_driver import token_bytes

BLOCK_SIZE = 16

# Two blocks of valid token ids whose xxh64 is equal (RELIABILITY 1F); an attacker makes such a pair in 0.2 s.
COLLIDING_A = [151814, 50499, *range(1002, 1008), 9183, 117423, *range(1010, 1016)]
COLLIDING_B = [96829, 44660, *range(1002, 1008), 0, 0, *range(1010, 1016)]


def make_cache(num_blocks: int = 8) -> PrefixCache:
    return PrefixCache(num_blocks, BLOCK_SIZE * 4)


def block_of(start: int) -> list[int]:
    return list(range(start, start + BLOCK_SIZE))


def publish(cache: PrefixCache, *blocks: tuple[int, list[int]]) -> None:
    """Publish a chain of (block, tokens) from the root."""
    chain = PrefixChain()
    for block, tokens in blocks:
        cache.publish(block, chain, token_bytes(tokens))
    cache.check_integrity()


def match(cache: PrefixCache, *blocks: list[int]) -> list[int]:
    """The blocks found for a chain of full blocks."""
    return cache.match(token_bytes([token for block in blocks for token in block]), len(blocks))[0]


def test_the_hash_chains_the_previous_hash_as_little_endian_bytes() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)), (1, block_of(100)))
    _, chain = cache.match(token_bytes(block_of(1) + block_of(100)), 2)
    first = xxh64_intdigest(token_bytes(block_of(1)))
    assert chain.digest == xxh64_intdigest(first.to_bytes(8, "little") + token_bytes(block_of(100))).to_bytes(
        8, "little"
    )


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


def test_a_parent_computed_again_finds_its_children_again() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)), (1, block_of(2)))
    cache.forget(0)
    cache.check_integrity()
    assert match(cache, block_of(1), block_of(2)) == []
    publish(cache, (5, block_of(1)))
    assert match(cache, block_of(1), block_of(2)) == [5, 1]


def test_a_content_that_nobody_names_is_dropped_with_its_parents() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)), (1, block_of(2)), (2, block_of(3)))
    for block in (0, 1, 2):
        cache.forget(block)
        cache.check_integrity()
    publish(cache, (3, block_of(1)))
    assert match(cache, block_of(1), block_of(2)) == [3]


def test_the_newest_block_of_a_content_wins_and_an_older_one_leaves_its_entry_alone() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)))
    publish(cache, (1, block_of(1)))
    assert match(cache, block_of(1)) == [1]
    cache.forget(0)
    assert match(cache, block_of(1)) == [1]
    cache.forget(1)
    assert match(cache, block_of(1)) == []


def test_a_hidden_block_is_not_found_but_keeps_its_content() -> None:
    cache = make_cache()
    publish(cache, (0, block_of(1)), (1, block_of(2)))
    cache.hide(0)
    cache.check_integrity()
    assert match(cache, block_of(1)) == []
    assert cache.holds(0)
    publish(cache, (2, block_of(1)))
    assert match(cache, block_of(1), block_of(2)) == [2, 1]
