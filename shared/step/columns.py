"""The types of a step's columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Column = npt.NDArray[np.int32]
Float32Column = npt.NDArray[np.float32]
BoolColumn = npt.NDArray[np.bool_]

# A slot and a checkpoint each.
StatePairs = Sequence[tuple[int, int]]
