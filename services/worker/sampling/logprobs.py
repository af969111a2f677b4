"""Log-probabilities in the model's own distribution, in the form of a step's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.forward.staging import to_device
from services.worker.ops import Ops
from shared.request.sampling_params import SamplingOptions
from shared.step.columns import Int32Column
from shared.step.logprobs import Logprobs

ScoreTensors = tuple[Tensor, Tensor, Tensor]
"""What `Ops.token_logprobs` returns: token ids and log-probabilities [n, width], and ranks [n, own tokens]."""


@dataclass(frozen=True, slots=True)
class WantedEntries:
    """Which entries the rows of a step want besides that of their own token."""

    nums_top: Int32Column
    """[n]: see `SamplingOptions.num_top`."""
    requested: npt.NDArray[np.int64]
    """[n, the most that a row requests]: see `SamplingOptions.logprob_token_ids`; a row's last ones may be padding."""
    nums_requested: Int32Column
    """[n]."""

    @classmethod
    def of(cls, options: Sequence[SamplingOptions]) -> WantedEntries:
        """Entries of rows that want log-probabilities."""
        nums_top = np.array([each.num_top for each in options], np.int32)
        nums_requested = np.array([len(each.logprob_token_ids) for each in options], np.int32)
        # Padded with token 0, which every model has.
        requested = np.zeros((len(options), max(nums_requested, default=0)), np.int64)
        for row, each in enumerate(options):
            requested[row, : len(each.logprob_token_ids)] = each.logprob_token_ids
        return cls(nums_top, requested, nums_requested)

    def of_rows(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> WantedEntries:
        """Some rows: those that are True, or these, which may repeat."""
        return WantedEntries(self.nums_top[rows], self.requested[rows], self.nums_requested[rows])


def token_logprobs(
    ops: Ops,
    logits: Tensor,
    token_ids: Int32Column,
    indexes: Int32Column,
    *,
    num_top: int,
    requested: Sequence[int] = (),
) -> Logprobs:
    """Log-probabilities of one token per row, of requested ones and of the most likely ones. Waits for the device.

    Args:
        logits: [n, vocabulary], float32, the largest of each row finite; not written.
        token_ids: [n].
        indexes: [n], for `Logprobs.indexes`.
        num_top: How many of the most likely tokens come last; ties go to the lower id.
        requested: Tokens that follow the row's own in each row.
    """
    own_ids = np.empty((len(token_ids), 1 + len(requested)), np.int64)
    own_ids[:, 0], own_ids[:, 1:] = token_ids, requested
    scores = ops.token_logprobs(logits, to_device(own_ids, logits.device), num_top)
    return make_logprobs([tensor.cpu().numpy() for tensor in scores], indexes)


def make_logprobs(
    scores: Sequence[npt.NDArray[Any]], indexes: npt.NDArray[np.integer[Any]], wanted: WantedEntries | None = None
) -> Logprobs:
    """The result of `scores`, the values of `ScoreTensors`.

    Args:
        indexes: [n], for `Logprobs.indexes`.
        wanted: What each row wants of them, [n]; None means all that there are.
    """
    entries, values, ranks = scores
    (num_rows, width), max_requested = entries.shape, ranks.shape[1] - 1
    nums_top = np.full(num_rows, width - 1 - max_requested, np.int32)
    nums_requested = np.full(num_rows, max_requested, np.int32)
    if wanted is not None:
        nums_top, nums_requested = np.minimum(nums_top, wanted.nums_top), wanted.nums_requested
    number = np.arange(width)
    is_requested = number <= nums_requested[:, None]
    is_top = (number > max_requested) & (number <= max_requested + nums_top[:, None])
    is_wanted = np.where(number <= max_requested, is_requested, is_top)
    return Logprobs(
        indexes.astype(np.int32),
        ranks[is_requested[:, : 1 + max_requested]],
        1 + nums_requested + nums_top,
        entries[is_wanted],
        values[is_wanted],
        nums_requested if max_requested else None,
    )


def join_scores(parts: Sequence[ScoreTensors]) -> ScoreTensors:
    """Concatenate at least one part; all have as many entries per row."""
    if len(parts) == 1:
        return parts[0]
    entries, values, ranks = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return entries, values, ranks


def join_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    """Concatenate at least one part."""
    requested = None
    if any(part.requested_counts is not None for part in parts):
        requested = np.concatenate([_requested_counts(part) for part in parts])
    return Logprobs(
        indexes=np.concatenate([part.indexes for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        values=np.concatenate([part.values for part in parts]),
        requested_counts=requested,
    )


def _requested_counts(part: Logprobs) -> Int32Column:
    return np.zeros(len(part.indexes), np.int32) if part.requested_counts is None else part.requested_counts
