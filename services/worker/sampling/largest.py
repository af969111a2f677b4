"""Finds the largest entries of a row of a whole vocabulary; of equals the lower indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_Indexes = npt.NDArray[np.int64]

# Parts in which a row is looked at first: their largest entries bound the wanted ones from below.
_NUM_PARTS = 64


def largest(values: npt.NDArray[np.floating], count: int) -> _Indexes:
    """Indices of the `count` largest of `values`, ascending; no entry is NaN, `count` is at most their number."""
    if count == 0:
        return np.empty(0, np.int64)
    width = len(values) // _NUM_PARTS
    if 2 * count > width:
        return largest_down_to(values, count, edge=_edge(values, count))
    # Partitioning all entries costs ten times this: so many of them are as large as the last of the parts' largest.
    strides = values[: width * _NUM_PARTS].reshape(_NUM_PARTS, width)
    candidates = np.flatnonzero(values >= _edge(strides.max(axis=0), count))
    some = values[candidates]
    return candidates[largest_down_to(some, count, edge=_edge(some, count))]


def largest_down_to(values: npt.NDArray[np.floating], count: int, *, edge: np.floating) -> _Indexes:
    """What `largest` returns, if `edge` is known to be the last of them."""
    above = np.flatnonzero(values > edge)
    equal = np.flatnonzero(values == edge)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _edge(values: npt.NDArray[np.floating], count: int) -> np.floating:
    """The `count`-th largest."""
    edge: np.floating = np.partition(values, len(values) - count)[len(values) - count]
    return edge
