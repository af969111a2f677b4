"""Greedy drafts from a model, for all sequences together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.forward.staging import to_device
from services.worker.ops import Ops
from services.worker.spec_decode.drafts import NO_DRAFTS, Drafts
from services.worker.step import Int32Column


class Advance(Protocol):
    """Feeds the newest drafts to the drafting layers."""

    def __call__(self, rows: npt.NDArray[np.int64], token_ids: Tensor, hidden: Tensor, num_drafted: int, /) -> Tensor:
        """The next hidden states of some rows.

        Args:
            rows: [n].
            token_ids: [n] int64, their newest drafts.
            hidden: [n, hidden], the states they were drawn from.
            num_drafted: Drafts of each row so far, at least 1.

        Returns:
            [n, hidden], to draw the next drafts from.
        """


def draft_greedily(
    hidden: Tensor, counts: Int32Column, *, compute_logits: Callable[[Tensor], Tensor], ops: Ops, advance: Advance
) -> Drafts:
    """Draft `counts` tokens for each row.

    Ties go to the lower token id; logits that are not finite give some token of the vocabulary.

    Args:
        hidden: [num_rows, hidden], to draw the first drafts from; only read where `counts` is above 0.
        counts: [num_rows], at least 0.
        compute_logits: Hidden states [n, hidden] to logits [n, vocabulary] float32.
        advance: Called once per further draft, for all rows together.
    """
    drafted = np.zeros((len(counts), int(counts.max(initial=0))), np.int32)
    rows = np.flatnonzero(counts)
    if not len(rows):
        return Drafts(NO_DRAFTS, counts)
    hidden = hidden[to_device(rows, hidden.device)]
    for place in range(drafted.shape[1]):
        token_ids, _ = ops.greedy_sample(compute_logits(hidden))
        drafted[rows, place] = token_ids.cpu().numpy()
        goes_on = counts[rows] > place + 1
        if not goes_on.any():
            break
        kept = to_device(goes_on, hidden.device)
        rows = rows[goes_on]
        hidden = advance(rows, token_ids[kept], hidden[kept], place + 1)
    return Drafts(drafted[np.arange(drafted.shape[1]) < counts[:, None]], counts)
