"""The free KV blocks, in order of reuse."""

from __future__ import annotations

import numpy as np

from services.scheduler.core.cache.cached_prefix import BlockIds

_NOWHERE = -1
_MIN_WINDOW = 64


class FreeBlocks:
    """Blank blocks, and cached ones, of which the least recently freed is taken first.

    Cached blocks are in a queue from which entries are removed only at the head. A revived block leaves a void entry,
    dropped when the head reaches it or when the queue reaches the end of its memory and is packed. So freeing or
    reviving many blocks is one array operation, O(1) each.

    Invariant: an entry is valid exactly if it is at its block's recorded position, which only free cached blocks have.
    The queue has room for twice as many entries as blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_cached = 0
        # A stack, taken from its end: the lowest block number first.
        self._blank = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_blank = num_blocks
        self._queue = np.zeros(2 * num_blocks, np.int32)
        self._head = self._tail = 0
        self._position = np.full(num_blocks, _NOWHERE, np.int32)

    def __len__(self) -> int:
        return self.num_blank + self.num_cached

    @property
    def cached(self) -> BlockIds:
        """The cached blocks, the next to be taken first."""
        entries = self._queue[self._head : self._tail]
        cached: BlockIds = entries[self._position[entries] == np.arange(self._head, self._tail)]
        return cached

    @property
    def blank(self) -> BlockIds:
        """The blank blocks, the next to be taken last; must not be modified."""
        return self._blank[: self.num_blank]

    def add_blank(self, blocks: BlockIds) -> None:
        """Add blank blocks, the next to be taken last."""
        self._blank[self.num_blank : self.num_blank + len(blocks)] = blocks
        self.num_blank += len(blocks)

    def add_cached(self, blocks: BlockIds) -> None:
        """Add cached blocks, the least valuable first."""
        if self._tail + len(blocks) > len(self._queue):
            self._pack()
        end = self._tail + len(blocks)
        self._queue[self._tail : end] = blocks
        self._position[blocks] = np.arange(self._tail, end)
        self._tail = end
        self.num_cached += len(blocks)

    def revive(self, blocks: BlockIds) -> None:
        """Take out cached blocks, with their contents."""
        self._position[blocks] = _NOWHERE
        self.num_cached -= len(blocks)

    def take_blank(self, num_blocks: int) -> BlockIds:
        """Take the next blank blocks; there must be enough."""
        num_left = self.num_blank - num_blocks
        blocks = self._blank[num_left : self.num_blank][::-1].copy()
        self.num_blank = num_left
        return blocks

    def take_cached(self, num_blocks: int) -> BlockIds:
        """Take the next cached blocks; there must be enough."""
        taken = []
        while num_blocks:
            # Twice the number missing, so that void entries seldom cause another round.
            end = min(self._head + max(2 * num_blocks, _MIN_WINDOW), self._tail)
            entries = self._queue[self._head : end]
            valid = (self._position[entries] == np.arange(self._head, end)).nonzero()[0][:num_blocks]
            taken.append(entries[valid])
            num_blocks -= len(valid)
            self._head = end if num_blocks else self._head + int(valid[-1]) + 1
        blocks = np.concatenate(taken)
        self.revive(blocks)
        return blocks

    def blank_all(self) -> None:
        """Turn all cached blocks into blank ones."""
        cached = self.cached
        self.add_blank(cached[::-1])
        self.revive(cached)
        self._head = self._tail = 0

    def _pack(self) -> None:
        """Drop the void entries."""
        cached = self.cached
        self._head, self._tail = 0, len(cached)
        self._queue[: self._tail] = cached
        self._position[cached] = np.arange(self._tail)
