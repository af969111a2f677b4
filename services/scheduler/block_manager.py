"""Paged KV-cache bookkeeping: which physical block holds which tokens.

Plain Python. The scheduler image has no torch, and tests need no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.scheduler.free_blocks import BlockIds, FreeBlocks, as_block_ids
from services.scheduler.prefix_cache import PrefixCache, PrefixChain, PrefixMemo
from services.scheduler.sequence import TOKEN_BYTES, Sequence


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Blocks whose KV a sequence can share, in order, as a list and an array, and the chain up to the last of them.

    Nothing of it is to be changed, except that the chain advances with its sequence.
    """

    block_ids: list[int]
    block_array: BlockIds
    chain: PrefixChain
    num_tokens: int


class BlockManager:
    """Hands out fixed-size KV blocks and shares full ones between equal prefixes.

    A freed block keeps its content until it is reused; blocks without content are reused first, then the least
    recently freed one.

    Invariant: a block is free exactly when its reference count, the number of tables that hold it, is 0; a free
    block is cached exactly when it holds a content.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caches_prefixes = enable_prefix_caching
        self._block_bytes = block_size * TOKEN_BYTES
        self._prefixes = PrefixCache(num_blocks, self._block_bytes)
        self._ref_counts = np.zeros(num_blocks, np.int32)
        self._free = FreeBlocks(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that hold a prefix."""
        return self._free.num_cached

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> CachedPrefix:
        """The longest cached prefix of a waiting sequence; at least one token is left to compute, for its logits.

        It holds until blocks are taken, hidden or flushed. To look again costs little: one hash, and an array
        operation on the blocks that were found before when something left the index since.
        """
        memo = self._look(seq)
        num_tokens = len(memo.block_ids) * self.block_size
        return CachedPrefix(memo.block_ids, memo.block_array, memo.chain.copy(), num_tokens)

    def num_cached_tokens(self, seq: Sequence) -> int:
        """How many tokens of a waiting sequence `find_prefix` finds."""
        return len(self._look(seq).block_ids) * self.block_size

    def num_blocks_to_take(self, seq: Sequence, prefix: CachedPrefix) -> int:
        """How many of the free blocks `try_allocate` would take, revived ones included."""
        num_blocks = self.num_blocks_for(seq.num_stored_tokens)
        if prefix.block_ids:
            num_blocks -= int(np.count_nonzero(self._ref_counts[prefix.block_array]))
        return num_blocks

    def try_allocate(self, seq: Sequence, prefix: CachedPrefix) -> bool:
        """Give a waiting sequence the blocks of all its tokens, those of its cached prefix shared.

        All or nothing: when it returns False, too few are free and nothing has changed. Revived blocks count as
        taken.

        Args:
            seq: Has no blocks; all its tokens are stored.
            prefix: What `find_prefix` just found for it.
        """
        if self.num_blocks_to_take(seq, prefix) > self.num_free_blocks:
            return False
        if prefix.block_ids:
            self._share(prefix.block_array)
        num_new_blocks = self.num_blocks_for(seq.num_stored_tokens) - len(prefix.block_ids)
        seq.block_table = prefix.block_ids + self._take(num_new_blocks)
        seq.chain = prefix.chain
        seq.prefix_memo = None
        return True

    def try_take(self, num_blocks: int) -> list[int] | None:
        """Take blocks for tables that the caller extends; None, and nothing has changed, when too few are free."""
        return self._take(num_blocks) if num_blocks <= self.num_free_blocks else None

    def num_exclusive_blocks(self, seq: Sequence) -> int:
        """Blocks that become free when `seq` gives its blocks back; O(its blocks)."""
        return int(np.count_nonzero(self._ref_counts[as_block_ids(seq.block_table)] == 1))

    def publish(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Let later sequences find the full blocks of the first `num_computed_tokens` tokens.

        Call it once the step that computes them has been sent; the tokens are stored in the sequence.
        """
        num_blocks = num_computed_tokens // self.block_size
        if num_blocks > seq.chain.num_blocks and self._caches_prefixes:
            self._prefixes.publish(seq.chain, seq.block_table, tokens=seq.token_bytes, num_blocks=num_blocks)

    def free(self, seq: Sequence) -> None:
        """Take all blocks from a sequence; those that nobody else holds become free, contents kept."""
        blocks = as_block_ids(seq.block_table)
        self._ref_counts[blocks] -= 1
        is_free = self._ref_counts[blocks] == 0
        num_held = self._prefixes.num_held(seq.chain)
        # Tail first: the head of a prompt is the part a later prompt may share.
        self._free.add_cached(blocks[:num_held][is_free[:num_held]][::-1])
        self._free.add_blank(blocks[num_held:][is_free[num_held:]][::-1].tolist())
        seq.block_table = []
        seq.chain = PrefixChain()

    def hide(self, seq: Sequence) -> None:
        """Take all full blocks of a sequence out of the index: their KV cannot be trusted.

        Shared ones too: who computed them may have ended before anybody noticed.
        """
        for block in seq.block_table[: self._prefixes.num_held(seq.chain)]:
            self._prefixes.hide(block)

    def flush(self) -> int:
        """Forget all contents: nothing that was computed, or begun, before can be found.

        Blocks in use stay in use; sequences that hold some publish nothing more until they are admitted again.

        Returns:
            How many blocks lost a content: free ones, and those in use that could be found.
        """
        num_flushed = self.num_cached_blocks
        num_flushed += int(np.count_nonzero(self._ref_counts[self._prefixes.flush()]))
        self._free.blank_all()
        return num_flushed

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that counts, free blocks, index and the tables of all sequences with blocks agree."""
        held = [block for seq in sequences for block in seq.block_table]
        counts = np.bincount(as_block_ids(held), minlength=self.num_blocks)
        assert np.array_equal(self._ref_counts, counts), "reference counts"
        cached, blank = self._free.cached.tolist(), self._free.blank
        assert len(cached) == self.num_cached_blocks, "the number of cached blocks"
        assert sorted([*cached, *blank]) == np.flatnonzero(counts == 0).tolist(), "free blocks"
        self._prefixes.check_integrity(cached, blank)

    def _look(self, seq: Sequence) -> PrefixMemo:
        max_blocks = (seq.num_stored_tokens - 1) // self.block_size if self._caches_prefixes else 0
        tokens = memoryview(seq.token_bytes)[: max_blocks * self._block_bytes]
        seq.prefix_memo = self._prefixes.find(seq.prefix_memo, seq.cache_salt, tokens=tokens)
        return seq.prefix_memo

    def _share(self, blocks: BlockIds) -> None:
        self._free.revive(blocks[self._ref_counts[blocks] == 0])
        self._ref_counts[blocks] += 1

    def _take(self, num_blocks: int) -> list[int]:
        blank, cached = self._free.take(num_blocks)
        self._ref_counts[as_block_ids(blank)] = 1
        if cached.size:
            self._ref_counts[cached] = 1
            self._prefixes.forget(cached)
            blank += cached.tolist()
        return blank
