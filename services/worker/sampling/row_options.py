"""What the rows of a step ask for besides a draw: edited logits, and log-probabilities of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.drawing.row_edits import RowEdits
from services.worker.sampling.sampler import SamplingRows
from services.worker.sampling.sampling_state import SamplingState
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
        """What the rows' grammars and penalties change now. Their states must know all of their tokens so far."""
        states = [self.rows.states[row] for row in self.edited.tolist()]
        positions = self.rows.position[self.edited].tolist()
        edits = [state.edits(position) for state, position in zip(states, positions, strict=True)]
        # Read before the next mask may be started: a failure of that one concerns the next token.
        has_failed = np.array([state.has_failed for state in states], np.bool_)
        return EditedRows(self.edited, states, edits, has_failed)


@dataclass(frozen=True, slots=True)
class EditedRows:
    """Rows with the changes in their logits."""

    numbers: _Numbers
    states: list[SamplingState]
    edits: list[RowEdits]
    has_failed: npt.NDArray[np.bool_]
    """[n], whether a row's grammar cannot be followed further, so that its token is meaningless."""

    def append(self, drawn: npt.NDArray[np.integer[Any]]) -> None:
        """Tell the states their rows' tokens, and let them prepare their next edits.

        `drawn` [num_rows of the step] is negative for a row whose logits are not finite, which has no next token.
        """
        for token_id, state, has_failed in zip(drawn[self.numbers].tolist(), self.states, self.has_failed, strict=True):
            if token_id < 0:
                continue
            state.append(token_id)
            if not has_failed:
                state.prepare()
