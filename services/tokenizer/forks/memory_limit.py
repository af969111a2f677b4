"""The limit of a process's address space, which the kernel holds."""

from __future__ import annotations

import resource
from pathlib import Path


class MemoryLimit:
    """Limits this process for good: it gets `MemoryError` instead of more, and dumps no core."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes` are above what is mapped now."""
        self._num_bytes = num_bytes
        self._limit_bytes = _mapped_bytes() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (self._limit_bytes, self._limit_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    @property
    def is_half_used(self) -> bool:
        """Whether so much is still mapped: what one task leaves allocated must not count against the next one."""
        return self._limit_bytes - _mapped_bytes() < self._num_bytes / 2


def _mapped_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return num_pages * resource.getpagesize()
