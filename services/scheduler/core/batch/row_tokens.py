"""The tokens of a step that are kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch.slot_table import Slots, SlotTable
from shared.step.columns import Int32Column
from shared.step.logprobs import Logprobs
from shared.step.step import StepResult

_Mask = npt.NDArray[np.bool_]
_Places = npt.NDArray[np.intp]


@dataclass(slots=True)
class RowTokens:
    """Rows and their tokens."""

    slots: Slots  # [num_rows]
    token_ids: Int32Column  # [num_tokens]
    """Row after row."""
    counts: Int32Column | None = None  # [num_rows]
    """Tokens per row; None means one each."""
    logprobs: Logprobs | None = None
    """Values by index into `token_ids`."""

    @classmethod
    def of_result(cls, result: StepResult, row_slots: Slots, num_draft_tokens: int) -> RowTokens:
        """Split a result's tokens by row; `counts` is set if the worker drafts."""
        counts = result.counts
        if counts is None and num_draft_tokens:
            counts = np.ones(len(row_slots), np.int32)
        return cls(row_slots, result.token_ids, counts, result.logprobs)

    def places(self, first_positions: Int32Column) -> tuple[_Places, _Places]:
        """The row number and the position of each token, both [num_tokens]. Needs `counts`.

        `first_positions` [num_rows] are the positions of the rows' first tokens.
        """
        assert self.counts is not None
        rows = np.repeat(np.arange(len(self.slots)), self.counts)
        first_indexes = np.cumsum(self.counts) - self.counts
        return rows, np.arange(len(rows)) + (first_positions - first_indexes)[rows]

    def of_rows(self, is_kept: _Mask) -> RowTokens:
        """Keep some rows: `is_kept` [num_rows]."""
        if self.counts is None:
            return self._keep(self.slots[is_kept], None, is_kept)
        return self._keep(self.slots[is_kept], self.counts[is_kept], np.repeat(is_kept, self.counts))

    def without_last(self, row_numbers: Int32Column) -> RowTokens:
        """Remove the last token of rows, each named once. Sets `counts`."""
        counts = np.ones(len(self.slots), np.int32) if self.counts is None else self.counts
        kept = counts.copy()
        kept[row_numbers] = np.maximum(kept[row_numbers] - 1, 0)
        return RowTokens(self.slots, self.token_ids, counts, self.logprobs).cut(kept)

    def cut(self, counts: Int32Column) -> RowTokens:
        """Keep the first `counts` [num_rows] tokens of each row, at most all. Needs `counts`."""
        assert self.counts is not None
        ends = np.cumsum(self.counts) - self.counts + counts
        return self._keep(self.slots, counts, np.arange(len(self.token_ids)) < np.repeat(ends, self.counts))

    def find_bad_counts(self, slots: SlotTable, not_finite_rows: Int32Column) -> str | None:
        """Say why the rows cannot have these numbers of tokens; None when they can.

        A live sequence gets at least one token, and no more than it may still have. Rows that have ended, or whose
        tokens are meaningless, may have any number.
        """
        counts, num_rows = self.counts, len(self.slots)
        if counts is None:
            return None if len(self.token_ids) == num_rows else f"{len(self.token_ids)} tokens for {num_rows} rows"
        if len(counts) != num_rows:
            return f"{len(counts)} token counts for {num_rows} rows"
        if num_rows and not 0 <= int(counts.min()) <= int(counts.max()) <= 1 + slots.num_draft_tokens:
            return "a token count is out of range"
        if int(counts.sum()) != len(self.token_ids):
            return f"{len(self.token_ids)} tokens for rows that count {int(counts.sum())}"
        is_live = slots.live[self.slots]
        is_live[not_finite_rows] = False
        num_left = slots.max_num_tokens[self.slots] - slots.num_tokens[self.slots]
        if ((counts == 0) | (counts > num_left))[is_live].any():
            return "a sequence gets no token, or more than it may have"
        return None

    def _keep(self, slots: Slots, counts: Int32Column | None, is_kept: _Mask) -> RowTokens:
        logprobs = None if self.logprobs is None else self.logprobs.select(is_kept)
        return RowTokens(slots, self.token_ids[is_kept], counts, logprobs)
