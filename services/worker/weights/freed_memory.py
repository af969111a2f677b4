"""Where freed memory goes: back to the system while a model is loaded, to the next allocation while it runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# Source: glibc's malloc.h; mallopt(3) says what they do.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LOADING_THRESHOLD = 1 << 20
# The value that glibc's dynamic mmap threshold rises to by itself once a block of this size has been freed. The trim
# threshold then becomes twice as large.
_RUNNING_THRESHOLD = 32 << 20


@contextmanager
def return_freed_memory() -> Iterator[None]:
    """Inside the context, the memory of a large tensor returns to the system as soon as it is freed.

    By default glibc keeps it in its heap, as holes between the weights that remain; they added up to a fifth of the
    size of the weights when measured. With another C library this does nothing.
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
