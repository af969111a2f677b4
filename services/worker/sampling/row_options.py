"""What the rows of a step ask for besides a draw: edited logits, and log-probabilities of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.sampling.logprobs import WantedEntries
from services.worker.sampling.sampling_rows import EditedRows, SamplingRows

_Numbers = npt.NDArray[np.int64]


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

    def edit(self) -> EditedRows:
        """What the rows' grammars and penalties change now; see `SamplingRows.edit`."""
        return self.rows.edit(self.edited)
