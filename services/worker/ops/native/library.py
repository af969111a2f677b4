"""Loads the compiled kernels: plain C functions that take addresses and sizes.

The kernels run on torch's OpenMP threads, so that a process has one pool of them: the library is not linked with an
OpenMP runtime, and finds the functions of the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch  # noqa: F401 - loads the OpenMP runtime

from services.worker.ops.native.build import BuildError, build
from services.worker.ops.native.isa import Isa

_RUNTIMES = ("libgomp", "libiomp5", "libomp")


@cache
def load_library(isa: Isa) -> ctypes.CDLL:
    """The kernels for `isa`, built if necessary.

    Raises:
        BuildError: they cannot be built, or torch runs without OpenMP.
    """
    library = build(isa)
    # Makes the functions of the runtime visible to libraries that are loaded after it.
    ctypes.CDLL(str(_openmp_runtime()), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


def _openmp_runtime() -> Path:
    """The file of the OpenMP runtime that is loaded in this process."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(_RUNTIMES):
            return path
    raise BuildError("torch was built without OpenMP")
