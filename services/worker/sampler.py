"""Draws one token per row, from nothing but the row: its logits, parameters, seed and position.

Rows are drawn one by one, so a row's token cannot depend on its batch. The order is temperature, top-k, top-p;
ties break by the lower token id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.noise import gumbel, noise_words
from services.worker.ops import Ops

# Temperatures below this are greedy.
GREEDY_TEMPERATURE = 1e-5

_FloatRow = npt.NDArray[np.float32]
_Floats = npt.NDArray[np.float64]
_TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of a step is sampled: columns with one entry per row."""

    temperature: npt.NDArray[np.float32]  # finite; below 1e-5 greedy
    top_k: npt.NDArray[np.int32]  # 0: all
    top_p: npt.NDArray[np.float32]  # in (0, 1]; 1: all
    seed: npt.NDArray[np.uint64]
    # The absolute position of the token being drawn: the tokens that the sequence has so far.
    position: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was drawn."""

    token_ids: npt.NDArray[np.int32]  # [num_rows]; means nothing in a row that is not finite
    not_finite_rows: npt.NDArray[np.int32]  # rows whose logits hold NaN or +Inf, or nothing above -Inf


class Sampler:
    """Draws tokens: greedy ones by the backend, the others by counter-based noise."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def sample(self, logits: Tensor, rows: SamplingRows) -> SampledTokens:
        """Draw one token for each row.

        Args:
            logits: [num_rows, vocabulary], float32; not written.
            rows: One entry for each of its rows.
        """
        greedy_ids, largest = self._ops.greedy_sample(logits)
        token_ids = greedy_ids.numpy().astype(np.int32)
        is_finite = np.isfinite(largest.numpy())
        drawn = np.flatnonzero((rows.temperature >= GREEDY_TEMPERATURE) & is_finite)
        if len(drawn):
            values = logits.numpy()
            for row in drawn.tolist():
                token_ids[row] = _draw(values[row], rows, row)
        return SampledTokens(token_ids, np.flatnonzero(~is_finite).astype(np.int32))


def _draw(logits: _FloatRow, rows: SamplingRows, row: int) -> int:
    """One token of one row by the Gumbel-max trick."""
    kept = _kept_columns(logits, float(rows.temperature[row]), int(rows.top_k[row]), float(rows.top_p[row]))
    # Columns are in ascending order, and argmax takes the first of equals: the lower token id.
    if kept is None:
        words = noise_words(int(rows.seed[row]), int(rows.position[row]), len(logits))
        return int((_scaled(logits, float(rows.temperature[row])) + gumbel(words)).argmax())
    if len(kept) == 1:
        return int(kept[0])
    words = noise_words(int(rows.seed[row]), int(rows.position[row]), int(kept[-1]) + 1)
    scores = _scaled(logits[kept], float(rows.temperature[row])) + gumbel(words[kept])
    return int(kept[scores.argmax()])


def _scaled(logits: _FloatRow, temperature: float) -> _Floats:
    return logits.astype(np.float64) / temperature


def _kept_columns(logits: _FloatRow, temperature: float, top_k: int, top_p: float) -> _TokenIds | None:
    """The columns that survive top-k, then top-p, in ascending order; None when neither filters."""
    kept = _top_k_columns(logits, top_k) if 0 < top_k < len(logits) else None
    if top_p < 1.0:
        if kept is None:
            return _in_nucleus(_scaled(logits, temperature), top_p)
        kept = kept[_in_nucleus(_scaled(logits[kept], temperature), top_p)]
    return kept


def _top_k_columns(logits: _FloatRow, top_k: int) -> _TokenIds:
    return _largest(logits, top_k, edge=np.partition(logits, len(logits) - top_k)[len(logits) - top_k])


def _in_nucleus(scaled: _Floats, top_p: float) -> _TokenIds:
    """The smallest set of the most probable entries that holds a share of `top_p`, ascending.

    Source: Holtzman et al., arXiv:1904.09751, section 3.1.
    """
    weights = np.exp(scaled - scaled.max())
    total = weights.sum()
    # Sorting is the cost. All entries below this threshold hold less than what is cut off: they are cut off.
    likely = weights[weights >= total * (1.0 - top_p) / (2 * len(weights))]
    descending = np.sort(likely)[::-1]
    held_before = np.cumsum(descending) - descending
    count = int(np.count_nonzero(held_before < top_p * total))
    return _largest(weights, count, edge=descending[count - 1])


def _largest(values: npt.NDArray[np.floating], count: int, *, edge: np.floating) -> _TokenIds:
    """Indices of the `count` largest values, ascending; of those equal to the last, `edge`, the lower indices."""
    above = np.flatnonzero(values > edge)
    equal = np.flatnonzero(values == edge)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))
