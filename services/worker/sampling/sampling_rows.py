"""How the rows of a step are drawn, and what changes their logits before that, on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.worker.drawing.row_edits import RowEdits
from services.worker.forward.staging import HostArrays, upload_arrays
from services.worker.ops import DrawRows
from services.worker.sampling.runs import Runs
from services.worker.sampling.sampling_state import SamplingState
from shared.step.columns import Int32Column

_NO_TOKENS: Int32Column = np.empty(0, np.int32)
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class EditedRows:
    """Rows with the changes in their logits."""

    numbers: npt.NDArray[np.int64]
    states: list[SamplingState]
    edits: list[RowEdits]
    has_failed: npt.NDArray[np.bool_]
    """[n], whether a row's grammar cannot be followed further, so that its token is meaningless."""

    def append(self, token_ids: npt.NDArray[np.integer[Any]]) -> None:
        """Tell the states their rows' tokens, and let them prepare their next edits.

        `token_ids` [n] is negative for a row whose logits are not finite, which has no next token.
        """
        for token_id, state, has_failed in zip(token_ids.tolist(), self.states, self.has_failed, strict=True):
            if token_id < 0:
                continue
            state.append(token_id)
            if not has_failed:
                state.prepare()


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row is sampled; a row is a sequence that gets tokens."""

    temperature: npt.NDArray[np.float32]  # [num_rows], finite; below 1e-5 greedy
    top_k: npt.NDArray[np.int32]  # [num_rows], 0: all
    top_p: npt.NDArray[np.float32]  # [num_rows], in (0, 1]; 1: all
    seed: npt.NDArray[np.uint64]  # [num_rows]
    choice: npt.NDArray[np.uint32]  # [num_rows], which of its request's choices a row is
    position: npt.NDArray[np.int64]  # [num_rows], absolute position of the first token drawn: the length so far
    states: dict[int, SamplingState] = field(default_factory=dict)
    """States by row, for sequences with options."""

    def by_place(self, runs: Runs) -> SamplingRows:
        """[num_places], a row without drafts for each place of the rows' `runs`."""
        row = runs.rows
        return SamplingRows(
            temperature=self.temperature[row],
            top_k=self.top_k[row],
            top_p=self.top_p[row],
            seed=self.seed[row],
            choice=self.choice[row],
            position=self.position[row] + runs.offsets,
            states={
                place: self.states[its_row] for place, its_row in enumerate(row.tolist()) if its_row in self.states
            },
        )

    def draw_rows(
        self,
        device: torch.device,
        chosen: npt.NDArray[np.int64] | slice = _ALL,
    ) -> DrawRows:
        """How the backend draws the `chosen` rows."""
        row_to_options = {row: state.options for row, state in self.states.items()}
        columns: HostArrays = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed.view(np.int64),
            "choice": self.choice.astype(np.int64),
            "position": self.position,
            **DrawRows.option_columns(len(self.temperature), row_to_options),
        }
        return DrawRows(**upload_arrays({name: column[chosen] for name, column in columns.items()}, device))

    def edit(self, numbers: npt.NDArray[np.int64]) -> EditedRows:
        """What the rows `numbers`, which have states, change now. The states must know all tokens so far."""
        states = [self.states[row] for row in numbers.tolist()]
        positions = self.position[numbers].tolist()
        edits = [state.edits(position) for state, position in zip(states, positions, strict=True)]
        # Read before the next mask may be started: a failure of that one concerns the next token.
        has_failed = np.array([state.has_failed for state in states], np.bool_)
        return EditedRows(numbers, states, edits, has_failed)
