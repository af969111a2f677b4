"""The tokens of benchmarks: random prompts, and outputs that detect mix-ups.

Needs only numpy, since drivers of peers import it in separate environments.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

# A prime, so that seeds, or positions, that differ by less than it never give the same token.
VOCABULARY = 32_003
# From the first on all tokens are ordinary in every vocabulary used here; those before it may be special.
_FIRST_TOKEN_ID = 1000
_LAST_TOKEN_ID = 40_000

IntArray = npt.NDArray[np.int64]


class PromptSource:
    """Random prompts, never reused and without common prefixes, so that the prefix cache has no effect.

    Attributes:
        num_tokens: Of each prompt.
    """

    def __init__(self, num_tokens: int, *, seed: int = 1) -> None:
        self.num_tokens = num_tokens
        self._random = random.Random(seed)

    def take(self, count: int) -> list[list[int]]:
        """Draw the next prompts."""
        return [
            [self._random.randrange(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(self.num_tokens)]
            for _ in range(count)
        ]


def expected_tokens(seeds: IntArray, positions: IntArray) -> IntArray:
    """The completion tokens of sequences with these seeds at these positions, counted from 0.

    Each sequence has another token at each position, so a benchmark that compares them notices mix-ups.
    """
    return (seeds * 7919 + positions * 104_729) % VOCABULARY
