"""Makes a child process end with its parent, however that ends, and not before."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def make_end_with_parent(parent_pid: int) -> Callable[[], None]:
    """A function for a child to call: it is then killed when the thread that started it ends, or exits if it is gone.

    Only Linux kills the child. The function may run between fork and exec.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def end_with_parent() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before prctl was called.
        if os.getppid() != parent_pid:
            os._exit(1)

    return end_with_parent


def leave_end_to_parent() -> None:
    """Ignore the signals that ask a process to end: the parent gets them too, and may need this child to finish."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
