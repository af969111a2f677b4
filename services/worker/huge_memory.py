"""Memory that kernels read from everywhere, or from one end to the other."""

from __future__ import annotations

import mmap
from contextlib import suppress


def huge_memory(num_bytes: int) -> mmap.mmap:
    """New memory of at least one byte, in huge pages where the system has them.

    It is zeros, which the system writes when a page is first used. It is private, since shared memory has huge pages
    only by another setting, which few systems have.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel may have been built without them.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
