"""Log-probabilities of tokens in the model's own distribution.

Computed row by row in a fixed order, so that a row's bytes do not depend on its batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.worker.drawing.largest import largest

_Int32Row = npt.NDArray[np.int32]
_FloatRow = npt.NDArray[np.float32]


def row_logprobs(row: _FloatRow, token_id: int, num_top: int) -> tuple[_Int32Row, _FloatRow, int]:
    """Log-probabilities of one token and of the row's most likely ones.

    Args:
        row: [vocabulary], the largest logit finite; not written.
        num_top: At most the size of the vocabulary; ties go to the lower id.

    Returns:
        (the token and then the most likely ones [1 + num_top], their log-probabilities, the token's rank from 1).
    """
    entries = np.empty(1 + num_top, np.int32)
    entries[0] = token_id
    entries[1:] = _likeliest(row, num_top)
    return entries, _log_softmax(row, entries).astype(np.float32), _rank(row, token_id)


def _likeliest(row: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """The most likely first."""
    token_ids = largest(row, count)
    return token_ids[np.argsort(-row[token_ids], kind="stable")]


def _log_softmax(row: npt.NDArray[np.float32], token_ids: _Int32Row) -> npt.NDArray[np.float64]:
    shifted = row - row.max()
    # Exponentials in float32 are ten times as fast; summing in float64 adds an error smaller than theirs.
    log_total = np.log(np.exp(shifted).sum(dtype=np.float64))
    values: npt.NDArray[np.float64] = shifted[token_ids].astype(np.float64) - log_total
    return values


def _rank(row: npt.NDArray[np.float32], token_id: int) -> int:
    own = row[token_id]
    return 1 + int(np.count_nonzero(row > own)) + int(np.count_nonzero(row[:token_id] == own))
