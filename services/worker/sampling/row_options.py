"""What the rows of a step ask for besides a draw: edited logits, and log-probabilities of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.worker.sampling.logprobs import WantedEntries
from services.worker.sampling.runs import Runs
from services.worker.sampling.sampling_rows import EditedRows, SamplingRows
from shared.step.columns import Int32Column

_Numbers = npt.NDArray[np.int64]


class ScoredPlaces(NamedTuple):
    """Where log-probabilities are wanted, among places whose tokens may turn out not to count."""

    places: _Numbers
    """[n], among those that tokens are drawn at."""
    rows: _Numbers
    """[n], the row of each."""
    nth: _Numbers
    """[n], how many tokens its row has before it."""
    wanted: WantedEntries
    """[n]."""

    def is_counted(self, counts: Int32Column | None) -> npt.NDArray[np.bool_]:
        """[n], whether each is among its row's tokens; `counts` [num_rows] are theirs, None means one each."""
        is_counted: npt.NDArray[np.bool_] = self.nth < (1 if counts is None else counts[self.rows])
        return is_counted

    def indexes(self, counts: Int32Column | None) -> _Numbers:
        """[n], among the step's tokens; of a place that is not counted, meaningless."""
        if counts is None:
            return self.rows
        indexes: _Numbers = (np.cumsum(counts, dtype=np.int64) - counts)[self.rows] + self.nth
        return indexes


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The options of a step's rows."""

    rows: SamplingRows
    edited: _Numbers
    """Rows whose logits are edited, ascending."""
    scored: _Numbers
    """Rows whose tokens' log-probabilities are wanted, ascending."""
    wanted: WantedEntries
    """[len(scored)]."""

    @classmethod
    def of(cls, rows: SamplingRows) -> RowOptions:
        """The options of the rows that have a state."""
        states = sorted(rows.states.items())
        edited = [row for row, state in states if state.changes_logits]
        scored = {row: state.options for row, state in states if state.options.num_top is not None}
        wanted = WantedEntries.of(list(scored.values()))
        return cls(rows, np.array(edited, np.int64), np.array(list(scored), np.int64), wanted)

    def scored_places(self, runs: Runs, lengths: _Numbers) -> ScoredPlaces:
        """The first places of the scored rows' runs, `lengths` [num_rows] of each."""
        its_lengths = lengths[self.scored]
        number = np.repeat(np.arange(len(self.scored)), its_lengths)
        nth = np.arange(len(number)) - np.repeat(np.cumsum(its_lengths) - its_lengths, its_lengths)
        rows = self.scored[number]
        return ScoredPlaces(runs.firsts[rows] + nth, rows, nth, self.wanted.of_rows(number))

    def edit(self) -> EditedRows:
        """What the rows' grammars and penalties change now; see `SamplingRows.edit`."""
        return self.rows.edit(self.edited)


NO_OPTIONS = RowOptions.of(
    SamplingRows(
        temperature=np.empty(0, np.float32),
        top_k=np.empty(0, np.int32),
        top_p=np.empty(0, np.float32),
        seed=np.empty(0, np.uint64),
        choice=np.empty(0, np.uint32),
        position=np.empty(0, np.int64),
    )
)
"""The options of rows that have none."""
