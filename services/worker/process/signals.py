"""Stop signals for a process with a blocked main thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from shared.process.lifecycle import SAME_STOP_S, stop_signals


def call_at_stop_signals(stop: Callable[[], None], end: Callable[[], None]) -> None:
    """Call `stop` at the first stop signal, and `end` at one that comes more than `SAME_STOP_S` later.

    They are called on a thread of their own. Once, from the main thread.

    Python runs signal handlers only in the main thread, which a signal delivered to another thread does not wake from a
    lock. A byte in the wakeup fd wakes its reader.
    """
    # Never closed: needed as long as the process runs.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in stop_signals():
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        os.read(reader, 1)
        asked_at = time.monotonic()
        stop()
        while True:
            os.read(reader, 1)
            if time.monotonic() - asked_at > SAME_STOP_S:
                end()
                return

    threading.Thread(target=wait, name="signals", daemon=True).start()
