"""The largest entries of a vocabulary-sized row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_Indexes = npt.NDArray[np.int64]

# A row is first reduced to the elementwise maximum of this many equal parts: a lower bound for the result.
_NUM_PARTS = 64


def largest(values: npt.NDArray[np.floating], count: int) -> _Indexes:
    """Indices of the `count` largest values, ascending, the lower among equals.

    No value may be NaN; `count` is at most `len(values)`.
    """
    if count == 0:
        return np.empty(0, np.int64)
    width = len(values) // _NUM_PARTS
    if 2 * count > width:
        return largest_down_to(values, count, edge=_edge(values, count))
    # At least `count` entries reach the `count`-th largest of the maxima, and few others do. Partitioning all entries
    # instead would cost ten times as much.
    strides = values[: width * _NUM_PARTS].reshape(_NUM_PARTS, width)
    candidates = np.flatnonzero(values >= _edge(strides.max(axis=0), count))
    some = values[candidates]
    return candidates[largest_down_to(some, count, edge=_edge(some, count))]


def largest_down_to(values: npt.NDArray[np.floating], count: int, *, edge: np.floating) -> _Indexes:
    """Like `largest`, given the `count`-th largest entry, `edge`."""
    above = np.flatnonzero(values > edge)
    equal = np.flatnonzero(values == edge)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _edge(values: npt.NDArray[np.floating], count: int) -> np.floating:
    edge: np.floating = np.partition(values, len(values) - count)[len(values) - count]
    return edge
