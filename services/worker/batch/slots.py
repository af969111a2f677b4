"""What the host knows of the sequence in each slot. Plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.batch.block_tables import BlockTables
from services.worker.batch.enter_checks import BatchLimits, are_distinct, require


class Slots:
    """Columns by slot, [max_num_seqs] each, which an `InputBatch` writes and nothing else.

    Invariant: `num_tokens` counts a slot's tokens, including sampled ones, of which a step that is not recorded yet
    has one. After a step the cache holds the KV of all of them while `num_later` more prompt tokens are to come, then
    of all but the last. KV left there by rejected drafts is overwritten before it is read.
    """

    def __init__(self, limits: BatchLimits) -> None:
        num_slots = limits.max_num_seqs
        self.is_used = np.zeros(num_slots, dtype=np.bool_)
        self.num_tokens = np.zeros(num_slots, dtype=np.int32)
        self.max_num_tokens = np.zeros(num_slots, dtype=np.int32)
        self.num_later = np.zeros(num_slots, dtype=np.int32)
        # The last token of a sequence whose tokens are recorded.
        self.last_tokens = np.zeros(num_slots, dtype=np.int32)
        self.tables = BlockTables(
            num_slots=num_slots,
            num_pool_blocks=limits.num_blocks,
            max_blocks_per_sequence=-(-limits.context_length // limits.block_size),
        )

    def check_used(self, column: str, slots: npt.NDArray[np.integer[Any]], *, may_repeat: bool = False) -> None:
        """Raise StepMismatchError unless each of `slots` holds a sequence, and none occurs twice unless it may."""
        limit = len(self.is_used)
        in_range = not len(slots) or 0 <= slots.min() <= slots.max() < limit
        require(bool(in_range), "a slot is out of range", column=column, limit=limit)
        require(bool(self.is_used[slots].all()), "a slot holds no sequence", column=column)
        require(may_repeat or are_distinct(slots), "a slot occurs twice", column=column)
