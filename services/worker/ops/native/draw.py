"""The draw of tokens: kernels/draw.cpp."""

from __future__ import annotations

from struct import Struct

from torch import Tensor

from services.worker.ops.arguments import DrawRows
from services.worker.ops.native.state import NativeState

_draw = Struct(f"P2q Pq {len(DrawRows.dtypes())}P P").pack


def draw(native: NativeState, logits: Tensor, rows: DrawRows, drawn: Tensor, token_ids: Tensor) -> None:
    """Draw rows of any stride, in several threads; see `composed.DrawingOps`."""
    native.library.ls_draw(
        _draw(
            *(logits.data_ptr(), logits.stride(0), logits.shape[1]),
            *(drawn.data_ptr(), len(drawn)),
            *(column.data_ptr() for column in rows.columns.values()),
            token_ids.data_ptr(),
        )
    )
