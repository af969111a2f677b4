"""AITER builds its kernels when they are first called, for minutes; where it cannot, it ends the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.worker.device import DeviceError


@contextmanager
def building() -> Iterator[None]:
    """Around first calls of AITER's kernels, and of AITER itself.

    Raises:
        DeviceError: AITER could not build a kernel.
    """
    try:
        yield
    except SystemExit as error:
        raise DeviceError(f"AITER cannot build a kernel; the log has the compiler's message: {error}") from error
