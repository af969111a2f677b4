"""The expected token of each sequence of a benchmark at each position, so that mix-ups are detected.

Needs only numpy, since drivers of peers import it in separate environments.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# A prime, so that seeds, or positions, that differ by less than it never give the same token.
VOCABULARY = 32_003

IntArray = npt.NDArray[np.int64]


def expected_tokens(seeds: IntArray, positions: IntArray) -> IntArray:
    """The completion tokens of sequences with these seeds at these positions, counted from 0."""
    return (seeds * 7919 + positions * 104_729) % VOCABULARY
