"""Draws the tokens of a step's rows, each only from its own logits, parameters, options and noise.

A draft is accepted exactly when it would have been drawn without it: drafts change when tokens arrive, never which.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.drawing.token_draw import GREEDY_TEMPERATURE
from services.worker.forward.staging import to_device
from services.worker.ops import DrawRows, Ops
from services.worker.sampling.edited_runs import EditedRuns
from services.worker.sampling.logprobs import ScoreTensors, WantedEntries, join_scores
from services.worker.sampling.runs import DeviceRuns, Runs
from services.worker.sampling.sampling_rows import EditedRows, SamplingRows

SAMPLING_VERSION = 1
"""Raised with every change after which equal logits, parameters, options and noise may draw other tokens."""

# Bounds the logits that are copied: 128 rows for a vocabulary of 128k are 64 MiB.
_MAX_COPIED_ROWS = 128

_Numbers = npt.NDArray[np.int64]


class RedrawnRuns(NamedTuple):
    """Runs whose edited rows were drawn by the host."""

    drawn: Tensor
    """[num_places] int64, as `Sampler.draw` returns them."""
    runs: DeviceRuns
    """Wanted is nothing where a grammar has failed."""
    failed_rows: _Numbers
    """Rows with a grammar that could not be followed."""


class Sampler:
    """Draws each row from its logits, then again the rows whose logits the host edits, and scores what was drawn.

    Waits for nothing that the device computes, unless the ops do or a function says so.
    """

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._ops = ops
        self._not_finite = torch.tensor(-1, device=device)

    def draw(self, logits: Tensor, rows: DrawRows) -> Tensor:
        """Draw each row's token: [B] int64, -1 for a row whose largest logit is not finite.

        Args:
            logits: [B, vocabulary], float32; not written.
            rows: [B].
        """
        token_ids, is_finite = self._ops.sample(logits, rows)
        return torch.where(is_finite, token_ids, self._not_finite)

    def draw_runs(self, logits: Tensor, places: DrawRows, runs: DeviceRuns) -> Tensor:
        """Draw a token at each place of rows with drafts, as `draw`; any after the first that is not wanted.

        Where the host draws, too many would be drawn needlessly, so it draws them in order.

        Args:
            logits: [num_places, vocabulary], float32; not written.
            places: [num_places].
        """
        if not self._ops.draws_on_host:
            return self.draw(logits, places)
        is_costly = places.temperature >= GREEDY_TEMPERATURE
        if not is_costly.any():
            return self.draw(logits, places)
        # A greedy draw costs least, and shows what is finite.
        drawn = self.draw(logits, replace(places, temperature=places.temperature.masked_fill(is_costly, 0.0)))
        now = runs.firsts[is_costly[runs.firsts]]
        while len(now := now[drawn[now] >= 0]):
            drawn[now] = self.draw(logits[now], _selected(places, now))
            now = now[drawn[now] == runs.wanted[now]] + 1
        return drawn

    def redraw(self, logits: Tensor, drawn: Tensor, rows: SamplingRows, edited: EditedRows) -> Tensor:
        """Replace the tokens of edited rows without drafts: a new [B] int64.

        Args:
            logits: As in `draw`.
            drawn: From `draw`.
            rows: [B], on the host: how they are drawn.
            edited: At least one row.
        """
        numbers = to_device(edited.numbers, logits.device)
        before = drawn[numbers]
        token_ids = self._draw_edited(logits, drawn, rows, edited)
        return drawn.index_copy(0, numbers, torch.where(before < 0, before, token_ids))

    def redraw_runs(
        self, logits: Tensor, drawn: Tensor, rows: SamplingRows, runs: Runs, edited: _Numbers
    ) -> RedrawnRuns:
        """Replace the tokens of edited rows, which may have drafts, and add them to the rows' states. Waits.

        Args:
            logits: As in `draw_runs`.
            drawn: [num_places] int64, from `draw_runs`.
            rows: The step's, on the host: how they are drawn.
            edited: At least one row.
        """
        places = rows.by_place(runs)

        def draw(part: EditedRows) -> _Numbers:
            return self._draw_edited(logits, drawn, places, part).cpu().numpy()

        tokens = drawn.cpu().numpy().copy()
        edited_runs = EditedRuns(places, runs, tokens, draw, draws_in_order=self._ops.draws_on_host)
        edited_runs.draw_rows(edited)
        after = DeviceRuns(to_device(runs.firsts, logits.device), to_device(edited_runs.wanted, logits.device))
        return RedrawnRuns(to_device(tokens, logits.device), after, edited_runs.failed_rows())

    def score(self, logits: Tensor, drawn: Tensor, numbers: _Numbers, wanted: WantedEntries) -> ScoreTensors:
        """Log-probabilities of the tokens at the places `numbers`, at least one; meaningless where they are -1.

        Args:
            logits: As in `draw`.
            drawn: As `draw` or `redraw` returned them.
            wanted: [len(numbers)].
        """
        num_top, requested = int(wanted.nums_top.max()), None
        if wanted.requested.size:
            requested = to_device(wanted.requested, logits.device)
        parts = []
        for start in range(0, len(numbers), _MAX_COPIED_ROWS):
            part = slice(start, start + _MAX_COPIED_ROWS)
            own_logits, token_ids = self._finite_rows(logits, drawn, numbers[part])
            own_ids = token_ids[:, None]
            if requested is not None:
                own_ids = torch.cat((own_ids, requested[part]), dim=1)
            parts.append(self._ops.token_logprobs(own_logits, own_ids, num_top))
        return join_scores(parts)

    def _draw_edited(self, logits: Tensor, drawn: Tensor, rows: SamplingRows, edited: EditedRows) -> Tensor:
        """[len(edited.numbers)] int64, drawn from copies of their logits; meaningless where they are not finite."""
        parts = []
        for start in range(0, len(edited.numbers), _MAX_COPIED_ROWS):
            part = slice(start, start + _MAX_COPIED_ROWS)
            own_logits, _ = self._finite_rows(logits, drawn, edited.numbers[part])
            self._ops.edit_logits(own_logits, edited.edits[part])
            parts.append(self._ops.sample(own_logits, rows.draw_rows(logits.device, edited.numbers[part]))[0])
        return torch.cat(parts)

    def _finite_rows(self, logits: Tensor, drawn: Tensor, numbers: _Numbers) -> tuple[Tensor, Tensor]:
        """Copies of some rows and their tokens; all 0 where the row is not finite, which not all ops can take."""
        rows = to_device(numbers, logits.device)
        token_ids = drawn[rows]
        return logits[rows].masked_fill_((token_ids < 0)[:, None], 0.0), token_ids.clamp_(min=0)


def _selected(rows: DrawRows, numbers: Tensor) -> DrawRows:
    return DrawRows(**{name: column[numbers] for name, column in rows.columns.items()})
