"""The cached free blocks of one tenant, in order of release."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.scheduler.core.cache.cached_prefix import NO_BLOCKS, BlockIds

Stamps = npt.NDArray[np.int64]

NOT_CACHED = -1
_MIN_WINDOW = 64
_MIN_CAPACITY = 64


class CachedQueue:
    """A queue of blocks, the least recently freed first; any of them can be revived.

    Entries are removed only at the head. A revived block leaves a void entry, dropped when the head reaches it or when
    the queue reaches the end of its memory and is packed. So freeing or reviving many blocks is one array operation,
    O(1) each amortised.

    Invariant: an entry is valid exactly if its stamp is its block's; `num_blocks` counts the valid ones. The queues of
    a pool share the blocks' stamps.
    """

    def __init__(self, block_stamps: Stamps) -> None:
        self.num_blocks = 0
        self.weight = 1.0
        """The tenant's, when it last freed a block."""
        self.newest_stamp = 0
        self._block_stamps = block_stamps
        self._blocks = NO_BLOCKS
        self._stamps: Stamps = np.empty(0, np.int64)
        self._head = self._tail = 0

    @property
    def fullness(self) -> float:
        """Its blocks by its tenant's weight."""
        return self.num_blocks / self.weight

    @property
    def blocks(self) -> BlockIds:
        """Its blocks, the next to be taken first."""
        blocks = self._blocks[self._head : self._tail]
        valid: BlockIds = blocks[self._block_stamps[blocks] == self._stamps[self._head : self._tail]]
        return valid

    def add(self, blocks: BlockIds, first_stamp: int) -> None:
        """Add blocks, the least valuable first; their stamps begin with one above all that were given."""
        if self._tail + len(blocks) > len(self._blocks):
            self._pack(len(blocks))
        stamps = np.arange(first_stamp, first_stamp + len(blocks))
        end = self._tail + len(blocks)
        self._blocks[self._tail : end] = blocks
        self._stamps[self._tail : end] = stamps
        self._block_stamps[blocks] = stamps
        self._tail = end
        self.num_blocks += len(blocks)
        self.newest_stamp = first_stamp + len(blocks) - 1

    def take(self, num_blocks: int) -> BlockIds:
        """Take the next blocks, whose stamps stay; there must be enough."""
        self.num_blocks -= num_blocks
        taken = []
        while num_blocks:
            # Twice the number missing, so that void entries seldom cause another round.
            end = min(self._head + max(2 * num_blocks, _MIN_WINDOW), self._tail)
            blocks = self._blocks[self._head : end]
            valid = (self._block_stamps[blocks] == self._stamps[self._head : end]).nonzero()[0][:num_blocks]
            taken.append(blocks[valid])
            num_blocks -= len(valid)
            self._head = end if num_blocks else self._head + int(valid[-1]) + 1
        return np.concatenate(taken)

    def _pack(self, num_more: int) -> None:
        """Drop the void entries; makes room for as many blocks again."""
        blocks = self.blocks
        capacity = max(_MIN_CAPACITY, 2 * (len(blocks) + num_more))
        self._blocks, self._stamps = np.empty(capacity, np.int32), np.empty(capacity, np.int64)
        self._head, self._tail = 0, len(blocks)
        self._blocks[: self._tail] = blocks
        self._stamps[: self._tail] = self._block_stamps[blocks]
