"""Log-probabilities in the model's own distribution, computed row by row in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.drawing.largest import largest
from services.worker.step import Int32Column, Logprobs


def token_logprobs(logits: Tensor, token_ids: Int32Column, indexes: Int32Column, num_top: int) -> Logprobs:
    """Log-probabilities of one token per row, and of each row's most likely ones.

    Args:
        logits: [n, vocabulary], float32, the largest of each row finite; not written.
        token_ids: [n].
        indexes: [n], for `Logprobs.indexes`.
        num_top: How many of the most likely tokens follow the row's own; ties go to the lower id.
    """
    rows: npt.NDArray[np.float32] = logits.cpu().numpy()
    num_entries = 1 + min(num_top, rows.shape[1])
    entries = np.empty((len(rows), num_entries), np.int32)
    values = np.empty((len(rows), num_entries), np.float32)
    ranks = np.empty(len(rows), np.int32)
    for place, (row, token_id) in enumerate(zip(rows, token_ids.tolist(), strict=True)):
        entries[place, 0] = token_id
        entries[place, 1:] = _likeliest(row, num_entries - 1)
        values[place] = _log_softmax(row, entries[place])
        ranks[place] = _rank(row, token_id)
    counts = np.full(len(rows), num_entries, np.int32)
    return Logprobs(indexes, ranks, counts, entries.reshape(-1), values.reshape(-1))


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """Concatenate at least one part."""
    return Logprobs(
        indexes=np.concatenate([part.indexes for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        values=np.concatenate([part.values for part in parts]),
    )


def _likeliest(row: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """The most likely first."""
    token_ids = largest(row, count)
    return token_ids[np.argsort(-row[token_ids], kind="stable")]


def _log_softmax(row: npt.NDArray[np.float32], token_ids: Int32Column) -> npt.NDArray[np.float64]:
    shifted = row - row.max()
    # Exponentials in float32 are ten times as fast; summing in float64 adds an error smaller than theirs.
    log_total = np.log(np.exp(shifted).sum(dtype=np.float64))
    values: npt.NDArray[np.float64] = shifted[token_ids].astype(np.float64) - log_total
    return values


def _rank(row: npt.NDArray[np.float32], token_id: int) -> int:
    own = row[token_id]
    return 1 + int(np.count_nonzero(row > own)) + int(np.count_nonzero(row[:token_id] == own))
