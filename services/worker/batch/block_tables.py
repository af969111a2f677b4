"""Which KV blocks hold each sequence's tokens. Plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.batch.enter_checks import are_distinct
from shared.errors import StepMismatchError
from shared.step.columns import Int32Column

_FIRST_WIDTH = 16


class BlockTables:
    """One row of block ids per slot, in token order.

    Invariant: every id is below `num_pool_blocks`; after a slot's last block its row is 0.

    The width grows with the longest table so far; at full width the rows could take hundreds of MB.
    """

    def __init__(self, *, num_slots: int, num_pool_blocks: int, max_blocks_per_sequence: int) -> None:
        self._num_pool_blocks = num_pool_blocks
        # No table without repeats is longer than the pool.
        self._max_width = min(max_blocks_per_sequence, num_pool_blocks)
        self.width = min(_FIRST_WIDTH, self._max_width)
        """Columns; never fewer than before."""
        self.ids = np.zeros((num_slots, self.width), dtype=np.int32)
        """[num_slots, width], the blocks of each slot; not to be written outside, nor kept: a wider one follows."""
        self.num_blocks = np.zeros(num_slots, dtype=np.int32)
        """[num_slots], lengths of the tables; not to be written outside."""

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return self.ids.nbytes

    def append(self, slots: npt.NDArray[np.integer[Any]], block_ids: Int32Column) -> npt.NDArray[np.int64]:
        """Append one block to each slot's table; a slot that occurs n times gets n blocks, in that order.

        Returns:
            The column of each block in its table.

        Raises:
            StepMismatchError: an id is not in the pool, or there are too many for one sequence.
        """
        self._check(block_ids)
        columns: npt.NDArray[np.int64] = self.num_blocks[slots].astype(np.int64)
        if not are_distinct(slots):
            by_slot = np.argsort(slots, kind="stable")
            in_order = slots[by_slot]
            # How many earlier entries name the same slot: the slots are sorted, so it is the distance to the first.
            columns[by_slot] += np.arange(len(slots)) - np.searchsorted(in_order, in_order)
        self._make_room(int(columns.max(initial=-1)) + 1)
        self.ids[slots, columns] = block_ids
        # Of a slot that occurs several times, the last one counts.
        self.num_blocks[slots] = columns + 1
        return columns

    def clear(self, slots: Int32Column) -> None:
        """Empty these slots' tables."""
        self.ids[slots, : self.num_blocks[slots].max(initial=0)] = 0
        self.num_blocks[slots] = 0

    def _check(self, block_ids: Int32Column) -> None:
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self._num_pool_blocks:
            raise StepMismatchError("a block id is not in the pool", num_blocks=self._num_pool_blocks)

    def _make_room(self, width: int) -> None:
        if width > self._max_width:
            raise StepMismatchError("a block table is longer than one sequence can use", limit=self._max_width)
        if width > self.width:
            old_width, self.width = self.width, min(max(width, 2 * self.width), self._max_width)
            grown = np.zeros((len(self.ids), self.width), dtype=np.int32)
            grown[:, :old_width] = self.ids
            self.ids = grown
