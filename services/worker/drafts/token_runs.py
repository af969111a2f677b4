"""Runs of consecutive tokens that the host knows. Plain numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.step.columns import Int32Column

IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Runs of consecutive tokens, one per sequence, that continue what the cache holds."""

    first_positions: IntArray  # [num_runs]
    lengths: IntArray  # [num_runs], at least 1

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """[num_runs], each run's first token among all tokens."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    @property
    def lasts(self) -> npt.NDArray[np.int64]:
        """[num_runs], each run's last token among all tokens."""
        return np.cumsum(self.lengths, dtype=np.int64) - 1

    @property
    def context_lens(self) -> Int32Column:
        """[num_runs], KV tokens of each sequence, including its run."""
        context_lens: Int32Column = (self.first_positions + self.lengths).astype(np.int32)
        return context_lens

    def spread(self, values: IntArray) -> npt.NDArray[np.int64]:
        """`values[i]`, `values[i]` + 1, … for the tokens of run i: [num_tokens]."""
        return np.arange(self.lengths.sum(), dtype=np.int64) + np.repeat(values - self.starts, self.lengths)
