"""Stands in for AITER's enumerations. Source: AITER, csrc/include/aiter_enum.h."""

from __future__ import annotations

from enum import IntEnum


class _Named(IntEnum):
    def __str__(self) -> str:
        """As pybind11 writes it; AITER makes names of modules from it."""
        return f"{type(self).__name__}.{self.name}"


class ActivationType(_Named):
    """Members:"""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2


class QuantType(_Named):
    """Members:"""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5
