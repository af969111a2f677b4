"""Log-probabilities in the model's own distribution, in the form of a step's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.forward.staging import to_device
from services.worker.ops import Ops
from services.worker.step import Int32Column, Logprobs

ScoreTensors = tuple[Tensor, Tensor, Tensor]
"""What `Ops.token_logprobs` returns: token ids and log-probabilities [n, width], and ranks [n]."""


def token_logprobs(ops: Ops, logits: Tensor, token_ids: Int32Column, indexes: Int32Column, *, num_top: int) -> Logprobs:
    """Log-probabilities of one token per row, and of each row's most likely ones. Waits for the device.

    Args:
        logits: [n, vocabulary], float32, the largest of each row finite; not written.
        token_ids: [n].
        indexes: [n], for `Logprobs.indexes`.
        num_top: How many of the most likely tokens follow the row's own; ties go to the lower id.
    """
    drawn = to_device(token_ids.astype(np.int64), logits.device)
    scores = ops.token_logprobs(logits, drawn, num_top)
    return make_logprobs([tensor.cpu().numpy() for tensor in scores], indexes)


def make_logprobs(
    scores: Sequence[npt.NDArray[Any]], indexes: npt.NDArray[np.integer[Any]], nums_top: Int32Column | None = None
) -> Logprobs:
    """The result of `scores`, the values of `ScoreTensors`.

    Args:
        indexes: [n], for `Logprobs.indexes`.
        nums_top: [n], how many of the most likely tokens each row wants; None means all that there are.
    """
    entries, values, ranks = scores
    places = indexes.astype(np.int32)
    counts = np.full(len(entries), entries.shape[1], np.int32)
    if nums_top is None:
        return Logprobs(places, ranks, counts, entries.flatten(), values.flatten())
    counts = np.minimum(counts, 1 + nums_top)
    is_wanted = np.arange(entries.shape[1]) < counts[:, None]
    return Logprobs(places, ranks, counts, entries[is_wanted], values[is_wanted])


def join_scores(parts: Sequence[ScoreTensors]) -> ScoreTensors:
    """Concatenate at least one part; all have as many entries per row."""
    if len(parts) == 1:
        return parts[0]
    entries, values, ranks = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return entries, values, ranks


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """Concatenate at least one part."""
    return Logprobs(
        indexes=np.concatenate([part.indexes for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        values=np.concatenate([part.values for part in parts]),
    )
