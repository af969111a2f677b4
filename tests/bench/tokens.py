"""The token that each sequence of a benchmark is owed, so that one of another sequence or position is noticed.

Needs nothing but numpy: drivers of peers import it in environments of their own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# A prime, so that sequences whose seeds differ by less, and positions that do, never share a token.
VOCABULARY = 32_003

IntArray = npt.NDArray[np.int64]


def expected_tokens(seeds: IntArray, positions: IntArray) -> IntArray:
    """The completion tokens of sequences with these seeds at these positions, counted from 0."""
    return (seeds * 7919 + positions * 104_729) % VOCABULARY
