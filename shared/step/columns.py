"""The types of a step's columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Column = npt.NDArray[np.int32]
# For the wire's unsigned numbers of 32 bits.
Int64Column = npt.NDArray[np.int64]
Float32Column = npt.NDArray[np.float32]
BoolColumn = npt.NDArray[np.bool_]

# A slot and a checkpoint each.
StatePairs = Sequence[tuple[int, int]]

_FLOAT_DTYPE = np.dtype("<f4")


def encode_floats(values: Float32Column) -> bytes:
    """A column as it travels."""
    return values.astype(_FLOAT_DTYPE, copy=False).tobytes()


def decode_floats(data: bytes) -> Float32Column:
    """A view of a column that has travelled; raises ValueError if its size is not a multiple of 4 bytes."""
    return np.frombuffer(data, _FLOAT_DTYPE)
