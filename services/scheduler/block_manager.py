"""Paged KV-cache bookkeeping: which physical block holds which tokens.

Plain Python. The scheduler image has no torch, and tests need no GPU.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from services.scheduler.prefix_cache import PrefixCache, PrefixChain
from services.scheduler.sequence import TOKEN_BYTES, Sequence


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Blocks whose KV a sequence can share, in order, and the chain up to the last of them."""

    block_ids: list[int]
    chain: PrefixChain
    num_tokens: int


class BlockManager:
    """Hands out fixed-size KV blocks and shares full ones between equal prefixes.

    A freed block keeps its content until it is reused; blocks without content are reused first, then the least
    recently freed one.

    Invariant: a block is free exactly when its reference count, the number of tables that hold it, is 0; a free
    block stands in one of the two free lists, in the one of cached blocks exactly when it holds a content.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caches_prefixes = enable_prefix_caching
        self._block_bytes = block_size * TOKEN_BYTES
        self._prefixes = PrefixCache(num_blocks, self._block_bytes)
        self._ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that hold a prefix."""
        return len(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> CachedPrefix:
        """The longest cached prefix of a waiting sequence; at least one token is left to compute, for its logits."""
        max_blocks = (seq.num_stored_tokens - 1) // self.block_size if self._caches_prefixes else 0
        block_ids, chain = self._prefixes.match(seq.token_bytes, max_blocks)
        return CachedPrefix(block_ids, chain, len(block_ids) * self.block_size)

    def try_allocate(self, seq: Sequence, prefix: CachedPrefix) -> bool:
        """Give a waiting sequence the blocks of all its tokens, those of its cached prefix shared.

        All or nothing: when it returns False, too few are free and nothing has changed. Revived blocks count as
        taken.

        Args:
            seq: Has no blocks; all its tokens are stored.
            prefix: What `find_prefix` just found for it.
        """
        num_revived = sum(1 for block in prefix.block_ids if not self._ref_counts[block])
        num_new_blocks = self.num_blocks_for(seq.num_stored_tokens) - len(prefix.block_ids)
        if num_new_blocks > self.num_free_blocks - num_revived:
            return False
        for block in prefix.block_ids:
            self._share(block)
        seq.block_table = prefix.block_ids + [self._take() for _ in range(num_new_blocks)]
        seq.num_cached_blocks = len(prefix.block_ids)
        seq.chain = prefix.chain
        return True

    def try_append(self, seq: Sequence) -> int | None:
        """Extend `seq.block_table` by one block and return it; None, and nothing has changed, when none is free."""
        if not self.num_free_blocks:
            return None
        block = self._take()
        seq.block_table.append(block)
        return block

    def num_exclusive_blocks(self, seq: Sequence) -> int:
        """Blocks that become free when `seq` gives its blocks back; O(its blocks)."""
        return sum(1 for block in seq.block_table if self._ref_counts[block] == 1)

    def publish(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Let later sequences find the full blocks of the first `num_computed_tokens` tokens.

        Call it once the step that computes them has been sent; the tokens are stored in the sequence.
        """
        if not self._caches_prefixes:
            return
        width = self._block_bytes
        for number in range(seq.chain.num_blocks, num_computed_tokens // self.block_size):
            tokens = bytes(seq.token_bytes[number * width : (number + 1) * width])
            self._prefixes.publish(seq.block_table[number], seq.chain, tokens)

    def free(self, seq: Sequence) -> None:
        """Take all blocks from a sequence; those that nobody else holds become free, contents kept."""
        # Tail first: the head of a prompt is the part a later prompt may share.
        for block in reversed(seq.block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._give_back(block)
        seq.block_table = []
        seq.chain = PrefixChain()

    def hide_computed(self, seq: Sequence) -> None:
        """Take what the sequence itself computed out of the index: its KV cannot be trusted."""
        for block in seq.block_table[seq.num_cached_blocks : seq.chain.num_blocks]:
            self._prefixes.hide(block)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that counts, free lists, index and the tables of all sequences with blocks agree."""
        held = Counter(block for seq in sequences for block in seq.block_table)
        assert self._ref_counts == [held[block] for block in range(self.num_blocks)], "reference counts"
        free = [*self._blank, *self._cached]
        assert len(free) == len(set(free)), "a block is free twice"
        assert set(free) == {block for block, count in enumerate(self._ref_counts) if not count}, "free lists"
        assert all(self._prefixes.holds(block) for block in self._cached), "a cached block without content"
        assert not any(self._prefixes.holds(block) for block in self._blank), "a blank block with content"
        self._prefixes.check_integrity()

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._prefixes.forget(block)
        self._ref_counts[block] = 1
        return block

    def _share(self, block: int) -> None:
        if not self._ref_counts[block]:
            del self._cached[block]
        self._ref_counts[block] += 1

    def _give_back(self, block: int) -> None:
        if self._prefixes.holds(block):
            self._cached[block] = None
        else:
            self._blank.append(block)
