"""Log-probabilities from the worker, as columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shared.request.sampling_params import MAX_LOGPROBS
from shared.step.columns import BoolColumn, Float32Column, Int32Column


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The entries of a position: its own token, the requested tokens, the likeliest tokens."""

    index: int
    ranks: list[int]
    """[1 + requested tokens], of the own token and of the requested ones; 1 is the likeliest."""
    token_ids: Int32Column
    values: Float32Column


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities in columns, as `internal.v1.Logprobs` has them."""

    indexes: Int32Column  # [num_positions]
    ranks: Int32Column  # [num_positions + sum of requested_counts]
    counts: Int32Column  # [num_positions]
    token_ids: Int32Column  # [sum of counts]
    values: Float32Column  # [sum of counts]
    requested_counts: Int32Column | None = None  # [num_positions]; None means none anywhere

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

    def own_token_ids(self) -> Int32Column:
        """The token at each position: [num_positions]."""
        own: Int32Column = self.token_ids[np.cumsum(self.counts) - self.counts]
        return own

    def positions(self) -> Iterator[PositionLogprobs]:
        """One position at a time."""
        ends, rank_ends, ranks = np.cumsum(self.counts), np.cumsum(self._rank_counts), self.ranks.tolist()
        start = rank_start = 0
        for index, end, rank_end in zip(self.indexes.tolist(), ends.tolist(), rank_ends.tolist(), strict=True):
            own_ranks = ranks[rank_start:rank_end]
            yield PositionLogprobs(index, own_ranks, self.token_ids[start:end], self.values[start:end])
            start, rank_start = end, rank_end

    @property
    def _rank_counts(self) -> Int32Column:
        """The number of each position's ranks."""
        ones = np.ones(len(self.indexes), np.int32)
        return ones if self.requested_counts is None else ones + self.requested_counts

    def _fit_each_other(self) -> bool:
        counts, requested = self.counts, self.requested_counts
        if requested is None:
            requested = np.zeros(len(counts), np.int32)
        if not len(self.indexes) == len(requested) == len(counts) == len(self.ranks) - int(requested.sum()):
            return False
        nums_top = counts - 1 - requested
        if any(nums.size and not 0 <= nums.min() <= nums.max() <= MAX_LOGPROBS for nums in (requested, nums_top)):
            return False
        return int(counts.sum()) == len(self.token_ids) == len(self.values)

    def _pick(self, is_kept: BoolColumn, new_indexes: Int32Column) -> Logprobs | None:
        if not is_kept.any():
            return None
        is_entry_kept = np.repeat(is_kept, self.counts)
        return Logprobs(
            new_indexes[is_kept],
            self.ranks[np.repeat(is_kept, self._rank_counts)],
            self.counts[is_kept],
            self.token_ids[is_entry_kept],
            self.values[is_entry_kept],
            None if self.requested_counts is None else self.requested_counts[is_kept],
        )
