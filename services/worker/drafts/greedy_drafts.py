"""Greedy drafts from a model, for all sequences together.

A sequence's drafts are a chain: each is computed from the one before it. Everything else is known beforehand, so that
the device goes from one to the next, and on to the step that checks them, without the host:

    host      upload all inputs   launch every pass and the step
    device                           d0   d1   d2   …   the step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.forward.staging import HostArrays
from services.worker.ops import Ops
from shared.step.columns import Int32Column


class Advance(Protocol):
    """Feeds the newest drafts to the drafting layers, without waiting for the device."""

    def __call__(self, token_ids: Tensor, hidden: Tensor, num_drafted: int, /) -> Tensor:
        """The next hidden states of the first rows in a chain's order.

        Args:
            token_ids: [n] int64, their newest drafts.
            hidden: [n, hidden], the states they were drawn from.
            num_drafted: Drafts of each row so far, at least 1.

        Returns:
            [n, hidden], to draw the next drafts from.
        """


@dataclass(frozen=True, slots=True)
class DraftChain:
    """Rows in the order of their numbers of drafts, so that those that get another draft are always the first ones."""

    counts: Int32Column  # [num_rows], drafts of each row, at least 0
    order: npt.NDArray[np.int64]  # [num_rows], the rows, those with most drafts first
    sizes: tuple[int, ...]
    """How many rows have a first draft, a second one, and so on; all at least 1."""

    @classmethod
    def make(cls, counts: Int32Column) -> DraftChain:
        """The chain for these `counts`."""
        places = np.arange(counts.max(initial=0))
        sizes = (counts[:, None] > places).sum(axis=0)
        return cls(counts, (-counts).argsort(kind="stable"), tuple(sizes.tolist()))

    @property
    def drafting(self) -> npt.NDArray[np.int64]:
        """The rows that have drafts, in order."""
        return self.order[: self.sizes[0] if self.sizes else 0]

    def draft(
        self, hidden: Tensor, *, compute_logits: Callable[[Tensor], Tensor], ops: Ops, advance: Advance
    ) -> Tensor:
        """Compute all drafts, at least one, without waiting for the device: [sum of counts] int64, draft after draft.

        Ties go to the lower token id; logits that are not finite give some token of the vocabulary.

        Args:
            hidden: [len(drafting), hidden], to draw the first drafts from.
            compute_logits: Hidden states [n, hidden] to logits [n, vocabulary] float32.
            advance: Called once per further draft, for all rows together.
        """
        token_ids, _ = ops.greedy_sample(compute_logits(hidden))
        drafted = [token_ids]
        for place, size in enumerate(self.sizes[1:], start=1):
            hidden = advance(token_ids[:size], hidden[:size], place)
            token_ids, _ = ops.greedy_sample(compute_logits(hidden))
            drafted.append(token_ids)
        return torch.cat(drafted)

    def arrays(self) -> HostArrays:
        """Where `draft` leaves the drafts, in int64.

        Returns:
            `by_row` [sum of counts]: all of them, row after row. For each of `drafting`, `last_drafts`: its last one,
            and `num_places`: how many tokens are drawn if all of its drafts are accepted.
        """
        places = np.arange(len(self.sizes))
        # The first row's draft at each place, in order.
        firsts = np.array(self.sizes, np.int64).cumsum() - self.sizes
        ranks = np.empty_like(self.order)
        ranks[self.order] = np.arange(len(ranks))
        counts = self.counts[self.drafting].astype(np.int64)
        return {
            "by_row": (ranks[:, None] + firsts)[places < self.counts[:, None]],
            "last_drafts": firsts[counts - 1] + np.arange(len(counts)),
            "num_places": counts + 1,
        }
