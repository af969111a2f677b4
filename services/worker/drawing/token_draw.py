"""Draws one token from one row of logits.

Plain numpy on the row alone: a token cannot depend on the batch. Ties go to the lower token id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from services.worker.drawing.largest import largest, largest_down_to
from services.worker.drawing.noise import gumbel, noise_words

# Temperatures below this are greedy.
GREEDY_TEMPERATURE = 1e-5

_FloatRow = npt.NDArray[np.float32]
_Floats = npt.NDArray[np.float64]
_TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """How a sequence's tokens are drawn: temperature, min-p, top-k, top-p, then counter-based noise."""

    temperature: float
    """Finite; below 1e-5 greedy."""
    top_k: int
    """0 keeps all tokens."""
    top_p: float
    """In (0, 1]; 1 keeps all tokens."""
    min_p: float
    """In [0, 1]; 0 keeps all tokens."""
    seed: int
    choice: int

    def token(self, logits: _FloatRow, position: int) -> int:
        """The most likely token if greedy, otherwise a draw by the Gumbel-max trick.

        Args:
            logits: [vocabulary], the largest of them finite; not written.
            position: The token's absolute position in its sequence; it selects the noise.
        """
        # Columns ascend, and argmax takes the first of equals: the lower token id.
        if self.temperature < GREEDY_TEMPERATURE:
            return int(logits.argmax())
        kept = self.kept_columns(logits)
        if kept is None:
            words = noise_words(self.seed, position, len(logits), choice=self.choice)
            return int((self._scaled(logits) + gumbel(words)).argmax())
        if len(kept) == 1:
            return int(kept[0])
        words = noise_words(self.seed, position, int(kept[-1]) + 1, choice=self.choice)
        scores = self._scaled(logits[kept]) + gumbel(words[kept])
        return int(kept[scores.argmax()])

    def kept_columns(self, logits: _FloatRow) -> _TokenIds | None:
        """The columns that survive min-p, top-k and top-p, ascending; None if no filter is set."""
        # Min-p and top-k both keep the largest entries, so either may come first, and top-k needs no exponentials.
        kept = largest(logits, self.top_k) if 0 < self.top_k < len(logits) else None
        if self.min_p > 0.0:
            kept = self._narrowed(logits, kept, partial(_above_share, min_p=self.min_p))
        if self.top_p < 1.0:
            kept = self._narrowed(logits, kept, partial(_in_nucleus, top_p=self.top_p))
        return kept

    def _scaled(self, logits: _FloatRow) -> _Floats:
        return logits.astype(np.float64) / self.temperature

    def _narrowed(self, logits: _FloatRow, kept: _TokenIds | None, choose: Callable[[_Floats], _TokenIds]) -> _TokenIds:
        return choose(self._scaled(logits)) if kept is None else kept[choose(self._scaled(logits[kept]))]


def _above_share(scaled: _Floats, min_p: float) -> _TokenIds:
    """Entries at least `min_p` times as probable as the best, ascending.

    Source: Nguyen et al., arXiv:2407.01082, section 3.
    """
    exponents = scaled - scaled.max()
    # Exponentials dominate the cost; few entries are near enough to need one.
    near: _TokenIds = np.flatnonzero(exponents >= math.log(min_p) - 1e-6)
    kept: _TokenIds = near[np.exp(exponents[near]) >= min_p]
    return kept


def _in_nucleus(scaled: _Floats, top_p: float) -> _TokenIds:
    """The fewest most probable entries that together reach `top_p`, ascending.

    Source: Holtzman et al., arXiv:1904.09751, section 3.1.
    """
    weights = np.exp(scaled - scaled.max())
    total = weights.sum()
    # Sorting dominates the cost. Entries below this threshold together hold less than 1 - top_p, so they are cut off.
    likely = weights[weights >= total * (1.0 - top_p) / (2 * len(weights))]
    descending = np.sort(likely)[::-1]
    held_before = np.cumsum(descending) - descending
    count = int(np.count_nonzero(held_before < top_p * total))
    return largest_down_to(weights, count, edge=descending[count - 1])
