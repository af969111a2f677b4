"""What an interrupt (SIGINT, by Ctrl-C) does in a process of the `lockstep` command.

While modules are imported it ends the process: an exception there would leave a traceback, or be lost in a callback.
"""

from __future__ import annotations

import signal


def end_on_interrupt() -> None:
    """Let an interrupt end the process at once, unless it is ignored, as in a shell's background job."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_on_interrupt() -> None:
    """Undo `end_on_interrupt`: an interrupt raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
