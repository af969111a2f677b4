"""Draws one token per row on the device, where the next step finds it; the host reads it later."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.forward.staging import to_device
from services.worker.ops import DrawRows, Ops
from services.worker.sampling.logprobs import ScoreTensors, WantedEntries, join_scores
from services.worker.sampling.sampling_rows import EditedRows, SamplingRows

# Bounds the logits that are copied: 128 rows for a vocabulary of 128k are 64 MiB.
_MAX_COPIED_ROWS = 128


class DeviceSampler:
    """Draws each row from its logits, then again the rows whose logits the host edits, and scores what was drawn.

    Waits for nothing that the device computes, unless the ops do.
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

    def redraw(self, logits: Tensor, drawn: Tensor, rows: SamplingRows, edited: EditedRows) -> Tensor:
        """Replace the tokens of edited rows: a new [B] int64.

        Args:
            logits: As in `draw`.
            drawn: From `draw`.
            rows: [B], on the host: how they are drawn.
            edited: At least one row.
        """
        parts = []
        for start in range(0, len(edited.numbers), _MAX_COPIED_ROWS):
            part = slice(start, start + _MAX_COPIED_ROWS)
            own_logits, _ = self._finite_rows(logits, drawn, edited.numbers[part])
            self._ops.edit_logits(own_logits, edited.edits[part])
            parts.append(self._ops.sample(own_logits, rows.draw_rows(logits.device, edited.numbers[part]))[0])
        numbers = to_device(edited.numbers, logits.device)
        before = drawn[numbers]
        return drawn.index_copy(0, numbers, torch.where(before < 0, before, torch.cat(parts)))

    def score(
        self, logits: Tensor, drawn: Tensor, numbers: npt.NDArray[np.int64], wanted: WantedEntries
    ) -> ScoreTensors:
        """Log-probabilities of the tokens of the rows `numbers`, at least one; meaningless where they are -1.

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

    def _finite_rows(self, logits: Tensor, drawn: Tensor, numbers: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Copies of some rows and their tokens; all 0 where the row is not finite, which not all ops can take."""
        rows = to_device(numbers, logits.device)
        token_ids = drawn[rows]
        return logits[rows].masked_fill_((token_ids < 0)[:, None], 0.0), token_ids.clamp_(min=0)
