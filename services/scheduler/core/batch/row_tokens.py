"""The tokens that a step brought, row by row, as far as they count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.scheduler.core.batch.logprobs import Logprobs
from services.scheduler.core.batch.slot_table import IntColumn, Slots, SlotTable

_Mask = npt.NDArray[np.bool_]
_Places = npt.NDArray[np.intp]


@dataclass(slots=True)
class RowTokens:
    """Rows and their tokens.

    `slots`: [num_rows]. `token_ids` [num_tokens]: the rows' tokens one behind the other; `counts` [num_rows] of each,
    None is one each. `logprobs` count their positions in `token_ids`.
    """

    slots: Slots
    token_ids: IntColumn
    counts: IntColumn | None = None
    logprobs: Logprobs | None = None

    def places(self, first_positions: IntColumn) -> tuple[_Places, _Places]:
        """Of each token its row's number and its position: both [num_tokens]. There are counts.

        Args:
            first_positions: [num_rows], those of the rows' first tokens in their sequences.
        """
        assert self.counts is not None
        rows = np.repeat(np.arange(len(self.slots)), self.counts)
        first_indexes = np.cumsum(self.counts) - self.counts
        return rows, np.arange(len(rows)) + (first_positions - first_indexes)[rows]

    def of_rows(self, is_kept: _Mask) -> RowTokens:
        """Those of some rows: `is_kept` [num_rows]."""
        if self.counts is None:
            return self._keep(self.slots[is_kept], None, is_kept)
        return self._keep(self.slots[is_kept], self.counts[is_kept], np.repeat(is_kept, self.counts))

    def without_last(self, row_numbers: IntColumn) -> RowTokens:
        """All rows, of which some, each named once, leave out their last token. There are counts then."""
        counts = np.ones(len(self.slots), np.int32) if self.counts is None else self.counts
        kept = counts.copy()
        kept[row_numbers] = np.maximum(kept[row_numbers] - 1, 0)
        return RowTokens(self.slots, self.token_ids, counts, self.logprobs).cut(kept)

    def cut(self, counts: IntColumn) -> RowTokens:
        """The first tokens of each row: `counts` [num_rows], of which none is more than it has. There are counts."""
        assert self.counts is not None
        ends = np.cumsum(self.counts) - self.counts + counts
        return self._keep(self.slots, counts, np.arange(len(self.token_ids)) < np.repeat(ends, self.counts))

    def find_bad_counts(self, slots: SlotTable, not_finite_rows: IntColumn) -> str | None:
        """Why rows cannot get so many tokens; None when they can.

        Whoever lives has tokens to come: at least one a row, and together no more than its last one. Rows whose
        sequence has ended, or whose tokens mean nothing, may have any number that a row can have.
        """
        counts, num_rows = self.counts, len(self.slots)
        if counts is None:
            return None if len(self.token_ids) == num_rows else f"{len(self.token_ids)} tokens for {num_rows} rows"
        if len(counts) != num_rows:
            return f"{len(counts)} numbers of tokens for {num_rows} rows"
        if num_rows and not 0 <= int(counts.min()) <= int(counts.max()) <= 1 + slots.num_draft_tokens:
            return "a number of tokens is out of range"
        if int(counts.sum()) != len(self.token_ids):
            return f"{len(self.token_ids)} tokens for rows of {int(counts.sum())}"
        is_live = slots.live[self.slots]
        is_live[not_finite_rows] = False
        num_left = slots.max_num_tokens[self.slots] - slots.num_tokens[self.slots]
        if ((counts == 0) | (counts > num_left))[is_live].any():
            return "a sequence gets no token, or one behind its last"
        return None

    def _keep(self, slots: Slots, counts: IntColumn | None, is_kept: _Mask) -> RowTokens:
        logprobs = None if self.logprobs is None else self.logprobs.select(is_kept)
        return RowTokens(slots, self.token_ids[is_kept], counts, logprobs)
