"""Log-probabilities of tokens in the model's own distribution.

Computed row by row in a fixed order, so that a row's bytes do not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.worker.drawing.largest import largest

_Int32Row = npt.NDArray[np.int32]
_FloatRow = npt.NDArray[np.float32]


def row_logprobs(row: _FloatRow, token_ids: Sequence[int], num_top: int) -> tuple[_Int32Row, _FloatRow, _Int32Row]:
    """Log-probabilities of some tokens and of the row's most likely ones.

    Args:
        row: [vocabulary], the largest logit finite; not written.
        token_ids: [num_tokens], in any order, repeats allowed.
        num_top: At most the size of the vocabulary; ties go to the lower id.

    Returns:
        (the tokens and then the most likely ones [num_tokens + num_top], their log-probabilities, the ranks of the
        tokens from 1 [num_tokens]).
    """
    entries = np.concatenate((token_ids, _likeliest(row, num_top))).astype(np.int32)
    ranks = np.array([_rank(row, token_id) for token_id in token_ids], np.int32)
    return entries, _log_softmax(row, entries).astype(np.float32), ranks


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
