"""SIGTERM, SIGINT and SIGHUP for a process whose main thread waits for work."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from shared.lifecycle import stop_signals


def call_at_stop_signals(on_signal: Callable[[], None]) -> None:
    """Call `on_signal`, in a thread of its own, at the first of the stop signals. Only from the main thread, once.

    Python runs a signal's handler in the main thread alone, and one that waits for a lock is not woken when the
    kernel gives the signal to another thread. The byte that the interpreter writes at once, whichever thread it is
    in, wakes a thread that waits for nothing else.
    """
    # Never closed: they live as long as the process.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in stop_signals():
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        os.read(reader, 1)
        on_signal()

    threading.Thread(target=wait, name="signals", daemon=True).start()
