"""Log-probabilities from the worker, as columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.limits import MAX_LOGPROBS

IntColumn = npt.NDArray[np.int32]
FloatColumn = npt.NDArray[np.float32]
BoolColumn = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The rank of a position's own token (1 is the likeliest), and its entries, the own token's first."""

    index: int
    rank: int
    token_ids: IntColumn
    values: FloatColumn


@dataclass(frozen=True, slots=True)
class Logprobs:
    """See `internal.v1.Logprobs`."""

    indexes: IntColumn  # [num_positions]
    ranks: IntColumn  # [num_positions]
    counts: IntColumn  # [num_positions]
    token_ids: IntColumn  # [sum of counts]
    values: FloatColumn  # [sum of counts]

    def select(self, is_kept: BoolColumn) -> Logprobs | None:
        """Keep some positions and renumber them from 0; None when none are left.

        `is_kept` has an item for each position that `indexes` may name.
        """
        new_indexes = np.cumsum(is_kept, dtype=np.int32) - 1
        return self._pick(is_kept[self.indexes], new_indexes[self.indexes])

    def after(self, index: int) -> Logprobs | None:
        """The positions above `index`, not renumbered; None when there are none."""
        return self._pick(self.indexes > index, self.indexes)

    def find_fault(self, num_positions: int, logits_width: int) -> str | None:
        """Say what is wrong with columns from the wire, if anything."""
        if not self._fit_each_other():
            return "columns of log-probabilities do not match each other"
        if not len(self.indexes):
            return None
        if self.indexes[0] < 0 or self.indexes[-1] >= num_positions or (self.indexes[1:] <= self.indexes[:-1]).any():
            return "a position of log-probabilities is out of range"
        if self.token_ids.min() < 0 or self.token_ids.max() >= logits_width:
            return "a token id of log-probabilities is out of range"
        if self.ranks.min() < 1 or self.ranks.max() > logits_width:
            return "a rank is out of range"
        return None

    def own_token_ids(self) -> IntColumn:
        """The token at each position: [num_positions]."""
        own: IntColumn = self.token_ids[np.cumsum(self.counts) - self.counts]
        return own

    def positions(self) -> Iterator[PositionLogprobs]:
        """One position at a time."""
        ends = np.cumsum(self.counts)
        columns = zip(
            self.indexes.tolist(), self.ranks.tolist(), (ends - self.counts).tolist(), ends.tolist(), strict=True
        )
        for index, rank, start, end in columns:
            yield PositionLogprobs(index, rank, self.token_ids[start:end], self.values[start:end])

    def _fit_each_other(self) -> bool:
        counts = self.counts
        if not len(self.indexes) == len(self.ranks) == len(counts):
            return False
        if counts.size and not 1 <= int(counts.min()) <= int(counts.max()) <= 1 + MAX_LOGPROBS:
            return False
        return int(counts.sum()) == len(self.token_ids) == len(self.values)

    def _pick(self, is_kept: BoolColumn, new_indexes: IntColumn) -> Logprobs | None:
        if not is_kept.any():
            return None
        is_entry_kept = np.repeat(is_kept, self.counts)
        return Logprobs(
            new_indexes[is_kept],
            self.ranks[is_kept],
            self.counts[is_kept],
            self.token_ids[is_entry_kept],
            self.values[is_entry_kept],
        )
