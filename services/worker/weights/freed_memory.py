"""Returns freed memory to the system while a model loads, and keeps it for reuse while it runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# Source: glibc's malloc.h; mallopt(3) says what they do.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LOADING_THRESHOLD = 1 << 20
# glibc raises its mmap threshold to this once a block of this size is freed, and its trim threshold to twice it.
_RUNNING_THRESHOLD = 32 << 20


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Return large tensors' memory to the system as soon as it is freed. Does nothing without glibc.

    By default glibc keeps it as holes between the remaining weights, measured at a fifth of their size.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _LOADING_THRESHOLD)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _RUNNING_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2 * _RUNNING_THRESHOLD)
