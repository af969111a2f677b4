"""Loads the compiled kernels: plain C functions that take addresses and sizes."""

from __future__ import annotations

import ctypes
from functools import cache

from services.worker.ops.native.build import BuildError, build
from services.worker.ops.native.isa import Isa, may_use_tiles


@cache
def load_library(isa: Isa) -> ctypes.CDLL:
    """The kernels for `isa`, built if necessary, with a pool of threads of their own.

    Raises:
        BuildError: they cannot be built, or the system refuses what they use.
    """
    if isa is Isa.AMX and not may_use_tiles():
        raise BuildError("the system refuses the use of tiles")
    return ctypes.CDLL(str(build(isa)))
