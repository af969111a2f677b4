"""Counter-based noise: a pure function of request, position, purpose and vocabulary column, the same in every process.

Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3) with

    key     = (seed, purpose << 32 | choice)
    counter = (column // 4, position, 0, 0)

whose four 64-bit words serve the columns 4 * (column // 4) + 0 … 3. Triton has the same variant, for a GPU backend.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

_WORD = 2**64


class NoisePurpose(enum.IntEnum):
    """What noise is used for: two uses at one position must not share it."""

    TOKEN = 0


def noise_words(
    seed: int, position: int, num_columns: int, *, purpose: NoisePurpose = NoisePurpose.TOKEN, choice: int = 0
) -> npt.NDArray[np.uint64]:
    """The words of the first columns, [num_columns].

    Args:
        seed: An unsigned 64-bit number.
        position: The token's absolute position in its sequence.
        num_columns: At least 1.
        choice: Which of the request's choices, below 2**32.
    """
    # numpy increments the counter before each block, so start one below the first; the borrow spans all four words.
    before = (position * _WORD - 1) % _WORD**4
    counter = np.array([before >> shift & (_WORD - 1) for shift in (0, 64, 128, 192)], dtype=np.uint64)
    key = np.array([seed, purpose << 32 | choice], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(num_columns)


def gumbel(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel variates: `-log(-log(u))` with u in (0, 1) from each word's upper 53 bits.

    The argmax of `logit + gumbel` is a draw from the softmax (Maddison et al., arXiv:1411.0030, section 2).
    """
    values = (words >> np.uint64(11)).astype(np.float64)
    values += 0.5
    values *= 2.0**-53
    np.log(values, out=values)
    np.negative(values, out=values)
    np.log(values, out=values)
    return np.negative(values, out=values)
