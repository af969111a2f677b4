"""What the rows of a step ask for besides a draw: edited logits, and log-probabilities of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.sampling.sampling_rows import EditedRows, SamplingRows
from services.worker.step import Int32Column

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The options of a step's rows."""

    rows: SamplingRows
    edited: _Numbers
    """Rows whose logits are edited, ascending."""
    scored: _Numbers
    """Rows whose tokens' log-probabilities are wanted, ascending."""
    nums_top: Int32Column
    """[len(scored)]: see `SamplingOptions.num_logprobs`."""

    @classmethod
    def of(cls, rows: SamplingRows) -> RowOptions:
        """Those of the rows that have a state."""
        states = sorted(rows.states.items())
        edited = [row for row, state in states if state.changes_logits]
        nums_top = {row: num for row, state in states if (num := state.options.num_logprobs) is not None}
        scored, tops = np.array(list(nums_top), np.int64), np.array(list(nums_top.values()), np.int32)
        return cls(rows, np.array(edited, np.int64), scored, tops)

    def edit(self) -> EditedRows:
        """What the rows' grammars and penalties change now; see `SamplingRows.edit`."""
        return self.rows.edit(self.edited)
