"""Where a step's logits are: a row's own, then those after each of its drafts. A row without drafts is a run of one.

    rows and drafts    t d0 d1     u     v d0
    places             0 1  2      3     4 5
    firsts             0           3     4
    wanted             d0 d1 -1    -1    d0 -1     the draft that the next place was computed with

A token is drawn at each place. A run goes on while they equal what is wanted, so that it gets one token at least.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from shared.step.columns import Int32Column
from shared.step.logprobs import Logprobs

_Numbers = npt.NDArray[np.int64]
_NO_ROWS: Int32Column = np.empty(0, np.int32)


class DeviceRuns(NamedTuple):
    """Runs on the device."""

    firsts: Tensor
    """[num_rows] int64: each run's first place."""
    wanted: Tensor
    """[num_places] int64, -1 where a run ends in any case."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens drawn in a step."""

    token_ids: Int32Column  # [sum of counts], row after row; 0, which every model has, in a row that is not finite
    not_finite_rows: Int32Column
    """Rows with NaN, +Inf or nothing above -Inf in their first logits."""
    counts: Int32Column | None = None  # [num_rows], at least 1: accepted drafts and one more; None means one each
    logprobs: Logprobs | None = None
    """Log-probabilities of finite rows that ask for them; `indexes` are places in `token_ids`."""
    failed_grammar_rows: Int32Column = field(default_factory=lambda: _NO_ROWS)
    """Rows with a grammar that cannot be followed further; their last token is meaningless."""

    def of_rows(self, rows: npt.NDArray[np.bool_]) -> SampledTokens:
        """The tokens of the rows that are True, without what else is known of them."""
        each = rows if self.counts is None else np.repeat(rows, self.counts)
        return SampledTokens(self.token_ids[each], _NO_ROWS, None if self.counts is None else self.counts[rows])

    def of_some(self, numbers: _Numbers, num_rows: int) -> SampledTokens:
        """The tokens of `num_rows` rows, of which these are the rows `numbers`, and the others have none."""
        counts = np.zeros(num_rows, np.int32)
        counts[numbers] = 1 if self.counts is None else self.counts
        not_finite, failed = (
            numbers[rows].astype(np.int32) for rows in (self.not_finite_rows, self.failed_grammar_rows)
        )
        return replace(self, counts=counts, not_finite_rows=not_finite, failed_grammar_rows=failed)


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a step's rows, on the host."""

    firsts: _Numbers  # [num_rows], ascending
    wanted: _Numbers
    """[num_places], as in `DeviceRuns`; 0 for drafts that the device computes."""
    rows: _Numbers
    """[num_places], each place's row."""
    offsets: _Numbers
    """[num_places], how many places of its run come before each."""

    @classmethod
    def of(cls, num_rows: int, draft_counts: Int32Column | None, draft_token_ids: Int32Column) -> Runs:
        """The runs of rows with these drafts, row after row; without counts none has any."""
        lengths = np.ones(num_rows, np.int64) if draft_counts is None else draft_counts + np.int64(1)
        ends = np.cumsum(lengths)
        firsts, wanted = ends - lengths, np.full(len(draft_token_ids) + num_rows, -1, np.int64)
        has_draft = np.ones(len(wanted), np.bool_)
        has_draft[ends - 1] = False
        wanted[has_draft] = draft_token_ids
        rows = np.repeat(np.arange(num_rows), lengths)
        return cls(firsts, wanted, rows, np.arange(len(wanted)) - firsts[rows])

    def lengths(self) -> _Numbers:
        """[num_rows], places of each run."""
        return np.diff(self.firsts, append=len(self.wanted))

    def drafted(self) -> _Numbers:
        """[num_drafts], the places whose next one was computed with a draft, row after row."""
        return np.flatnonzero(self.wanted >= 0)

    def sampled(self, drawn: _Numbers, counts: _Numbers | None) -> SampledTokens:
        """The tokens that count.

        Args:
            drawn: [num_places], -1 where logits are not finite.
            counts: [num_rows], those of `Ops.accept`; None means that each place is a row, whatever these runs are.
        """
        firsts, nums_sampled = drawn, None
        if counts is not None:
            firsts, nums_sampled = drawn[self.firsts], counts.astype(np.int32)
            drawn = drawn[self.offsets < counts[self.rows]]
        not_finite_rows = (firsts < 0).nonzero()[0].astype(np.int32)
        token_ids = np.maximum(drawn, 0).astype(np.int32)
        return SampledTokens(token_ids, not_finite_rows, nums_sampled, failed_grammar_rows=_NO_ROWS)


NO_RUNS = Runs.of(0, None, _NO_ROWS)
"""The runs of a step that needs none: its rows have neither drafts nor options."""
