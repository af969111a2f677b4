"""The draw of tokens: kernels/draw.cpp. Rows with top-k, top-p or min-p are drawn by numpy."""

from __future__ import annotations

import ctypes
from struct import Struct

from torch import Tensor

from services.worker.drawing.token_draw import GREEDY_TEMPERATURE
from services.worker.ops.arguments import DrawRows
from services.worker.ops.composed import ComposedOps, draw_on_host

_draw = Struct("P2q Pq P3P P").pack


class NativeDraws(ComposedOps):
    """`sample` of `Ops`."""

    _library: ctypes.CDLL

    def sample(self, logits: Tensor, rows: DrawRows) -> tuple[Tensor, Tensor]:
        token_ids, largest = self.greedy_sample(logits)
        is_finite = largest.isfinite()
        is_drawn = (rows.temperature >= GREEDY_TEMPERATURE) & is_finite
        if is_drawn.any():
            keeps_all = ((rows.top_k <= 0) | (rows.top_k >= logits.shape[1])) & (rows.top_p >= 1) & (rows.min_p <= 0)
            self._draw(logits, rows, (is_drawn & keeps_all).nonzero().flatten(), token_ids)
            filtered = (is_drawn & ~keeps_all).nonzero().flatten()
            if len(filtered):
                token_ids[filtered] = draw_on_host(logits, rows, filtered)
        return token_ids, is_finite

    def _draw(self, logits: Tensor, rows: DrawRows, drawn: Tensor, token_ids: Tensor) -> None:
        """Replace the largest logits' columns in `token_ids` by the drawn ones, in the rows `drawn`."""
        self._library.ls_draw(
            _draw(
                *(logits.data_ptr(), logits.stride(0), logits.shape[1]),
                *(drawn.data_ptr(), len(drawn)),
                *(rows.temperature.data_ptr(), rows.seed.data_ptr(), rows.choice.data_ptr(), rows.position.data_ptr()),
                token_ids.data_ptr(),
            )
        )
