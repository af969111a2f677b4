"""Drafts by a model: one token after the other, each the likeliest behind the one before, all sequences together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.ops import Ops
from services.worker.spec_decode.drafts import NO_DRAFTS, Drafts
from services.worker.step import Int32Column


class Advance(Protocol):
    """Computes the next hidden states of some rows."""

    def __call__(self, rows: npt.NDArray[np.int64], token_ids: Tensor, hidden: Tensor, num_drafted: int, /) -> Tensor:
        """Take the newest draft of some rows in.

        Args:
            rows: [n], which ones.
            token_ids: [n] int64, their newest drafts.
            hidden: [n, hidden], what these were drawn from.
            num_drafted: How many drafts each has, at least 1.

        Returns:
            [n, hidden], what their next drafts are drawn from.
        """


def draft_greedily(
    hidden: Tensor, counts: Int32Column, *, compute_logits: Callable[[Tensor], Tensor], ops: Ops, advance: Advance
) -> Drafts:
    """Draft `counts` tokens for each row; `advance` is called once for each further place, not once for each row.

    Of equal logits the lower token wins; where they are not finite, some token of the vocabulary does.

    Args:
        hidden: [num_rows, hidden], what the rows' first drafts are drawn from; only read where `counts` is above 0.
        counts: [num_rows], at least 0.
        compute_logits: Logits [n, vocabulary] float32 of hidden states [n, hidden].
        ops: The backend.
        advance: See `Advance`.
    """
    drafted = np.zeros((len(counts), int(counts.max(initial=0))), np.int32)
    rows = np.flatnonzero(counts)
    if not len(rows):
        return Drafts(NO_DRAFTS, counts)
    hidden = hidden[torch.from_numpy(rows)]
    for place in range(drafted.shape[1]):
        token_ids, _ = ops.greedy_sample(compute_logits(hidden))
        drafted[rows, place] = token_ids.numpy()
        goes_on = counts[rows] > place + 1
        if not goes_on.any():
            break
        kept = torch.from_numpy(goes_on)
        rows = rows[goes_on]
        hidden = advance(rows, token_ids[kept], hidden[kept], place + 1)
    return Drafts(drafted[np.arange(drafted.shape[1]) < counts[:, None]], counts)
