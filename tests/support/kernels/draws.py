"""How single rows are drawn, on the host and as columns for a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.worker.drawing.token_draw import TokenDraw
from services.worker.ops import DrawRows


@dataclass(frozen=True)
class Draw:
    """How one row is drawn."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 7
    choice: int = 0
    position: int = 5

    def token(self, logits: npt.NDArray[np.float32]) -> int:
        """The token that the host draws, with parameters rounded as on the device."""
        draw = TokenDraw(
            temperature=float(np.float32(self.temperature)),
            top_k=self.top_k,
            top_p=float(np.float32(self.top_p)),
            min_p=float(np.float32(self.min_p)),
            seed=self.seed,
            choice=self.choice,
        )
        return draw.token(logits, self.position)


def draw_rows(draws: Sequence[Draw]) -> DrawRows:
    """The rows as columns."""

    def column(name: str, dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.array([getattr(draw, name) for draw in draws], dtype))

    return DrawRows(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        seed=column("seed", np.uint64).view(torch.int64),
        choice=column("choice", np.int64),
        position=column("position", np.int64),
    )
