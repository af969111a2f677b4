"""Paged KV-cache bookkeeping: which physical block holds which tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from services.scheduler.core.batch.sequence import Sequence
from services.scheduler.core.cache.cached_prefix import BlockIds, CachedPrefix, PrefixCursor
from services.scheduler.core.cache.free_blocks import FreeBlocks
from services.scheduler.core.cache.kv_feed import KvFeed
from services.scheduler.core.cache.prefix_cache import PrefixCache
from services.scheduler.core.cache.state_checkpoints import CheckpointCounts, StateCheckpoints
from shared.step.columns import Int32Column, StatePairs

# A few cached blocks more or less do not matter in a large pool, and evicting many at once costs no more than one.
_EVICTION_BATCH = 512


class BlockCounts(NamedTuple):
    """KV blocks of one rank."""

    total: int
    free: int
    cached: int
    """Free blocks that can be found by their prefix."""


class BlockManager:
    """Hands out fixed-size KV blocks and shares full ones between equal prefixes.

    A freed block keeps its content until it is reused: blank blocks first, then the least recently freed one; between
    tenants as in `free_blocks`.

    Invariant: a block is free exactly when its reference count, the number of tables that hold it, is 0; a free block
    is cached exactly when it holds a content.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        kv_feed: KvFeed | None = None,
        num_checkpoints: int | None = None,
    ) -> None:
        """Make a pool of blank blocks.

        Args:
            enable_prefix_caching: Whether contents can be found.
            kv_feed: It is told of those that can be.
            num_checkpoints: How many recurrent states the worker can save; None for models without any.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caches_prefixes = enable_prefix_caching
        self._prefixes = PrefixCache(num_blocks, block_size, kv_feed)
        self._ref_counts = np.zeros(num_blocks, np.int32)
        self._free = FreeBlocks(num_blocks)
        self._states: StateCheckpoints | None = None
        if num_checkpoints is not None:
            self._states = StateCheckpoints(num_blocks, num_checkpoints, self._prefixes.note_state)
        if kv_feed is not None:
            kv_feed.states = self._states
        self.num_times_saves_ended = 0
        """How often states that were being saved became visible or were withdrawn."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks in no table."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that hold a content."""
        return self._free.num_cached

    @property
    def counts(self) -> BlockCounts:
        """Blocks by use."""
        return BlockCounts(self.num_blocks, self.num_free_blocks, self.num_cached_blocks)

    @property
    def checkpoint_counts(self) -> CheckpointCounts:
        """Saved recurrent states by use."""
        return CheckpointCounts(0, 0) if self._states is None else self._states.counts

    def set_kv_feed(self, kv_feed: KvFeed | None) -> None:
        """Tell a feed of all changes from now on; None ends that."""
        if kv_feed is not None:
            kv_feed.states = self._states
        self._prefixes.set_feed(kv_feed)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> CachedPrefix:
        """The longest cached prefix of a waiting sequence that leaves a token to compute, for its logits.

        With recurrent states, it ends where one is saved.

        Valid until blocks are taken, hidden or flushed. Looking again is free while nothing has changed.
        """
        prefix = seq.cached_prefix
        if prefix is None or prefix.version is not self._prefixes.version:
            max_blocks = (seq.num_stored_tokens - 1) // self.block_size if self._caches_prefixes else 0
            prefix = self._prefixes.find(seq.cache_salt, seq.token_bytes, max_blocks=max_blocks)
            if self._states is not None and prefix.num_tokens:
                prefix = self._up_to_state(seq, prefix, self._states)
            seq.cached_prefix = prefix
        return prefix

    def no_prefix(self, seq: Sequence) -> CachedPrefix:
        """An empty prefix for `try_allocate`; what is computed can still be shared."""
        return self._prefixes.find(seq.cache_salt, seq.token_bytes, max_blocks=0)

    def num_cached_tokens(self, seq: Sequence) -> int:
        """Tokens that `find_prefix` finds."""
        return self.find_prefix(seq).num_tokens

    def num_blocks_to_take(self, seq: Sequence, prefix: CachedPrefix) -> int:
        """Free blocks that `try_allocate` would take, including cached ones."""
        num_blocks = self.num_blocks_for(seq.num_stored_tokens)
        if prefix.num_tokens:
            num_blocks -= int(np.count_nonzero(self._ref_counts[prefix.block_ids]))
        return num_blocks

    def try_allocate(self, seq: Sequence, prefix: CachedPrefix) -> bool:
        """Give a waiting sequence blocks for all its tokens, sharing those of its cached prefix.

        All or nothing: when it returns False, too few blocks are free and nothing has changed.

        Args:
            seq: Has no blocks; all its tokens are stored.
            prefix: What `find_prefix` just returned for it.
        """
        if self.num_blocks_to_take(seq, prefix) > self.num_free_blocks:
            return False
        shared = prefix.block_ids
        if shared.size:
            self._free.revive(shared[self._ref_counts[shared] == 0])
            self._ref_counts[shared] += 1
        taken = self._take(self.num_blocks_for(seq.num_stored_tokens) - shared.size)
        seq.block_table = array("i", shared.tobytes() + taken.tobytes())
        seq.prefix_cursor, seq.cached_prefix = prefix.cursor, None
        return True

    def try_take(self, num_blocks: int) -> list[int] | None:
        """Take blocks for tables that the caller extends; None, with nothing changed, when too few are free."""
        return self._take(num_blocks).tolist() if num_blocks <= self.num_free_blocks else None

    def num_exclusive_blocks(self, seq: Sequence) -> int:
        """Blocks that freeing `seq` would make free; O(its blocks)."""
        return int(np.count_nonzero(self._ref_counts[_as_array(seq.block_table)] == 1))

    def publish(self, seq: Sequence, num_computed_tokens: int) -> None:
        """Let later sequences find the full blocks of the first `num_computed_tokens` tokens.

        Call it once the step that computes them has been sent; the tokens must be stored.
        """
        num_blocks = num_computed_tokens // self.block_size
        if num_blocks <= seq.prefix_cursor.num_blocks or not self._caches_prefixes:
            return
        table = _as_array(seq.block_table)
        num_before = seq.prefix_cursor.num_blocks
        outdated = self._prefixes.publish(seq.prefix_cursor, table, tokens=seq.token_bytes, num_blocks=num_blocks)
        if self._states is not None:
            self._states.move(outdated, table[self._prefixes.depths(outdated)])
            published = table[num_before:num_blocks]
            for block in published[self._states.are_saved(published)].tolist():
                # It was saved before it was published.
                self._prefixes.note_state(block, is_saved=True)
        outdated = outdated[self._ref_counts[outdated] == 0]
        if outdated.size:
            self._free.revive(outdated)
            self._free.add_blank(outdated)

    def free(self, sequences: Iterable[Sequence]) -> None:
        """Take all blocks from sequences; those in no other table become free, with their contents."""
        by_tenant: dict[int, list[Sequence]] = {}
        for seq in sequences:
            by_tenant.setdefault(seq.tenant_number, []).append(seq)
        for tenant, freed in by_tenant.items():
            blocks = np.concatenate([self._release(seq) for seq in freed])
            holds = self._prefixes.holds(blocks)
            self._free.add_cached(blocks[holds], tenant, freed[-1].tenant.weight)
            self._free.add_blank(blocks[~holds])

    def hide(self, seq: Sequence) -> None:
        """Hide a sequence's blocks from the prefix cache, because their KV cannot be trusted.

        Includes shared blocks: what computed them may have ended before the problem was noticed.
        """
        blocks = _as_array(seq.block_table)
        published = blocks[self._prefixes.holds(blocks)]
        if self._states is not None:
            self.num_times_saves_ended += 1
            # What continues these blocks was computed from their states.
            self._states.forget(blocks)
            self._states.forget(self._prefixes.find_behind(published))
        if published.size:
            self._prefixes.forget(published)

    def try_save_state(self, seq: Sequence, num_tokens: int, renewed_at: int = 0) -> int | None:
        """Take a checkpoint for the state after the first `num_tokens` tokens, which the next step saves.

        Args:
            seq: Has blocks for these tokens.
            num_tokens: A multiple of the block size, above 0.
            renewed_at: Likewise, of an earlier checkpoint of `seq` that may be overwritten; 0 for none.

        Returns:
            The checkpoint, or None if there is no room, or one is there.
        """
        if self._states is None or not self._caches_prefixes:
            return None
        block = seq.block_table[num_tokens // self.block_size - 1]
        if renewed_at:
            old_block = seq.block_table[renewed_at // self.block_size - 1]
            checkpoint = self._states.try_renew(old_block, block, seq.tenant_number, seq.tenant.weight)
        else:
            checkpoint = self._states.try_save(block, seq.tenant_number, seq.tenant.weight)
        self._prefixes.void_lookups()
        return checkpoint

    def try_reserve_state(self) -> int | None:
        """Take a checkpoint for a state that the next step may save; `attach_state` says after which tokens it did.

        None if there is no room.
        """
        if self._states is None or not self._caches_prefixes:
            return None
        checkpoint = self._states.try_reserve()
        # One that a lookup has found may be evicted.
        self._prefixes.void_lookups()
        return checkpoint

    def attach_state(self, seq: Sequence, checkpoint: int, num_tokens: int, renewed_at: int) -> None:
        """Note after which tokens of a sequence a reserved checkpoint was saved; as in `try_save_state`.

        Call it before `end_step`.
        """
        assert self._states is not None
        size = self.block_size
        old_block = seq.block_table[renewed_at // size - 1] if renewed_at else None
        block = seq.block_table[num_tokens // size - 1]
        self._states.attach(checkpoint, old_block, block, seq.tenant_number, seq.tenant.weight)
        self._prefixes.void_lookups()

    def restore_state(self, checkpoint: int) -> None:
        """Note that the next step reads the checkpoint of a prefix that `try_allocate` has just given a sequence."""
        assert self._states is not None
        self._states.restore(checkpoint)

    def end_step(self, saves: StatePairs, restores: StatePairs, not_finite_saves: Int32Column) -> None:
        """Take in the end of a step that saved and restored states; see `StateCheckpoints.end_step`.

        Blocks of sequences whose states it saved must not have been freed.
        """
        if self._states is not None and (saves or restores):
            self._states.end_step(saves, restores, set(not_finite_saves.tolist()))
            self._prefixes.void_lookups()
            self.num_times_saves_ended += bool(saves)

    def flush(self) -> int:
        """Forget all contents; returns how many blocks lost one.

        The sequences of blocks in use publish nothing more until they are admitted again.
        """
        if self._states is not None:
            self._states.clear()
            self.num_times_saves_ended += 1
        num_flushed = len(self._prefixes.flush())
        self._free.blank_all()
        return num_flushed

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that counts, free blocks, prefix index and block tables are consistent.

        `sequences` are all that have blocks.
        """
        held = array("i")
        for seq in sequences:
            held += seq.block_table
        counts = np.bincount(_as_array(held), minlength=self.num_blocks)
        assert np.array_equal(self._ref_counts, counts), "reference counts"
        cached, blank = self._free.cached.tolist(), self._free.blank.tolist()
        self._free.check_integrity()
        assert sorted([*cached, *blank]) == np.flatnonzero(counts == 0).tolist(), "free blocks"
        self._prefixes.check_integrity(cached, blank)
        if self._states is not None:
            self._states.check_integrity()
            assert not self._states.find(self._free.blank).num_blocks, "a state after a blank block"

    def _release(self, seq: Sequence) -> BlockIds:
        """Returns the blocks in no other table, the least valuable one first."""
        # Tail first: the head of a prompt is the part a later prompt may share.
        blocks = _as_array(seq.block_table)[::-1]
        counts = self._ref_counts[blocks] - 1
        self._ref_counts[blocks] = counts
        seq.block_table = array("i")
        seq.prefix_cursor = PrefixCursor()
        released = blocks[counts == 0] if np.count_nonzero(counts) else blocks
        if self._states is not None:
            self._states.forget(released[~self._prefixes.holds(released)])
        return released

    def _take(self, num_blocks: int) -> BlockIds:
        blocks = self._free.take_blank(min(num_blocks, self._free.num_blank))
        if len(blocks) < num_blocks:
            blocks = np.concatenate([blocks, self._evict(num_blocks - len(blocks))])
        self._ref_counts[blocks] = 1
        return blocks

    def _evict(self, num_blocks: int) -> BlockIds:
        evicted = self._free.take_cached(max(num_blocks, min(self._free.num_cached // 32, _EVICTION_BATCH)))
        if self._states is not None:
            self._states.forget(evicted)
            self._states.demote(self._prefixes.find_behind(evicted))
        self._prefixes.forget(evicted)
        self._free.add_blank(evicted[num_blocks:][::-1])
        return evicted[:num_blocks]

    def _up_to_state(self, seq: Sequence, prefix: CachedPrefix, states: StateCheckpoints) -> CachedPrefix:
        """The part of a prefix that can be continued."""
        found = states.find(prefix.block_ids)
        usable = prefix
        if found.num_blocks < len(prefix.block_ids):
            usable = self._prefixes.find(seq.cache_salt, seq.token_bytes, max_blocks=found.num_blocks)
        usable.checkpoint, usable.awaits_state = found.checkpoint, found.is_coming
        usable.num_lost_tokens = prefix.num_tokens - usable.num_tokens
        return usable


def _as_array(block_table: array[int]) -> BlockIds:
    """A view, valid until the table changes."""
    return np.frombuffer(block_table, np.int32)
