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
    """Where log-probabilities are wanted."""

    places: _Numbers
    """[n], among those that tokens are drawn at."""
    indexes: _Numbers
    """[n], among the step's tokens."""
    wanted: WantedEntries
    """[n]."""


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

    def scored_places(self, runs: Runs, counts: Int32Column | None) -> ScoredPlaces:
        """Places of the scored rows' tokens; `counts` [num_rows] are how many each row gets, None means one."""
        if counts is None:
            return ScoredPlaces(self.scored, self.scored, self.wanted)
        lengths = counts[self.scored]
        row = np.repeat(np.arange(len(self.scored)), lengths)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        starts = np.cumsum(counts, dtype=np.int64) - counts
        places, indexes = runs.firsts[self.scored][row] + nth, starts[self.scored][row] + nth
        return ScoredPlaces(places, indexes, self.wanted.of_rows(row))

    def edit(self) -> EditedRows:
        """What the rows' grammars and penalties change now; see `SamplingRows.edit`."""
        return self.rows.edit(self.edited)
