"""Makes a child process end with its parent, however that ends, and not before."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def leave_end_to_parent() -> Iterator[None]:
    """A process that this thread starts in the block never gets the signals that ask a process to end.

    A service manager sends them to all processes at once, and the parent may need this child to finish its answers. A
    child inherits which signals are blocked, so it is never without this: a handler that it set itself would come after
    its imports, which take a second. Not for processes that an event loop starts: libuv unblocks all signals in them.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
