"""The sequences that a step decodes, with their drafts. Plain numpy on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.worker.batch.block_tables import BlockTables
from shared.step.columns import Int32Column

NO_DRAFTS: Int32Column = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for some sequences."""

    token_ids: Int32Column  # [sum of counts], sequence after sequence; 0 where the device computes them
    counts: Int32Column  # [num_sequences], at least 0
    compute: Callable[[], Tensor] | None = None
    """Computes them as part of the step, without waiting: [sum of counts] int64. Called once, even without drafts; None
    if the host knows them."""

    @classmethod
    def on_device(cls, counts: Int32Column, compute: Callable[[], Tensor]) -> Drafts:
        """Drafts that only the device will know."""
        return cls(np.zeros(counts.sum(), np.int32), counts, compute)

    def counts_of_rows(self, num_rows: int) -> Int32Column:
        """[num_rows], drafts of each row of a step whose first rows are these sequences."""
        counts = np.zeros(num_rows, np.int32)
        counts[: len(self.counts)] = self.counts
        return counts


class DraftSource(Protocol):
    """What a batch with drafts tells about its sequences, and asks for; see `Drafter`."""

    def enter(self, slot: int, token_ids: Int32Column, max_num_tokens: int) -> None:
        """Add a sequence with its first tokens, possibly none; it never has more than `max_num_tokens`."""

    def extend(self, slot: int, token_ids: Int32Column) -> None:
        """Add more tokens of a prompt."""

    def leave(self, slots: Int32Column) -> None:
        """Forget sequences."""

    def last_tokens(self, slots: Int32Column) -> Int32Column:
        """[len(slots)], each sequence's last token; it has at least one."""

    def propose(self, slots: Int32Column, most: Int32Column, *, most_together: int, tables: BlockTables) -> Drafts:
        """Draft for sequences to decode; `record` then learns how the drafts did.

        Args:
            slots: [num_sequences].
            most: [num_sequences], the most drafts that each can use, at least 0.
            most_together: Limit for all of them, at least 0; first rows first.
            tables: The blocks of every slot.
        """

    def record(self, slots: Int32Column, token_ids: Int32Column, counts: Int32Column | None) -> None:
        """Add the tokens that sequences got; see `SampledTokens`."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """The sequences that a step decodes."""

    num_slots: int
    """All of them, including full ones, which are not computed."""
    numbers: npt.NDArray[np.int64] | None
    """The computed sequences; None means all."""
    slots: Int32Column
    drafts: Drafts | None
    """For `slots`; None means that no sequence has any."""
    compute_drafts: Callable[[], Tensor] | None = None
    """See `Drafts.compute`."""

    def row_numbers(self, num_rows: int) -> npt.NDArray[np.int64]:
        """[num_rows], the result's row of each computed row, these decodes first. Only some of them are computed."""
        assert self.numbers is not None, "all are computed"
        num_others = num_rows - len(self.numbers)
        return np.concatenate([self.numbers, np.arange(self.num_slots, self.num_slots + num_others)])
