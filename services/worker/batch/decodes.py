"""The sequences that a step decodes, with their drafts. Plain numpy on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.batch.drafts import Drafts
from shared.step.columns import Int32Column


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

    def row_numbers(self, num_rows: int) -> npt.NDArray[np.int64] | None:
        """[num_rows], the result's row of each computed row, these decodes first; None means the same."""
        if self.numbers is None:
            return None
        num_others = num_rows - len(self.numbers)
        return np.concatenate([self.numbers, np.arange(self.num_slots, self.num_slots + num_others)])

    def draft_counts(self, num_rows: int) -> Int32Column | None:
        """[num_rows], drafts of each row, these decodes first; None means that no row has any."""
        if self.drafts is None:
            return None
        counts = np.zeros(num_rows, np.int32)
        counts[: len(self.slots)] = self.drafts.counts
        return counts
