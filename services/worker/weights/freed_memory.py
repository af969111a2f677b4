"""Where freed memory goes: to the system while a model is loaded, to the next allocation while it runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# Source: glibc's malloc.h, and mallopt(3) for what they do.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LOADING_THRESHOLD = 1 << 20
# What glibc's threshold rises to by itself once so large a block has been freed, and the other one with it.
_RUNNING_THRESHOLD = 32 << 20


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Inside, the memory of a large tensor goes back to the system as soon as it is freed.

    glibc would keep it in its heap, as holes between weights that stay: a fifth of the weights in all, measured.
    Elsewhere (another C library) this does nothing.
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
