"""Counts of observed values by size, for Prometheus.

The Prometheus library's own histogram takes a lock and walks its buckets at each observation, which the paths of tokens
and steps cannot afford.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Values by bucket. One thread observes; another may read, and may then miss a part of the last observation."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the buckets' greatest values, ascending; a last bucket takes what is above them."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Each bucket's bound and the number of values up to it, as the Prometheus library takes them."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self._counts), strict=True))
