"""A process that ends with the one that started it, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def make_end_with_parent(parent_pid: int) -> Callable[[], None]:
    """What a child calls so that it is killed when the thread that started it ends, or ends now if that is over.

    The kernel does so on Linux alone. It may be called between fork and exec: nothing is loaded there.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def end_with_parent() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before the kernel was asked.
        if os.getppid() != parent_pid:
            os._exit(1)

    return end_with_parent
