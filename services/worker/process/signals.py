"""Stop signals for a process with a blocked main thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from shared.process.lifecycle import stop_signals


def call_at_stop_signals(*actions: Callable[[], None]) -> None:
    """Call the first action at the first stop signal, and so on, on their own thread. Once, from the main thread.

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
        for action in actions:
            os.read(reader, 1)
            action()

    threading.Thread(target=wait, name="signals", daemon=True).start()
