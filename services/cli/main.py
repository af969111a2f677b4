"""The entry of the `lockstep` command. It imports almost nothing before it has decided what an interrupt does."""

from __future__ import annotations

import signal
import sys

from services.cli.interrupts import end_on_interrupt

_INTERRUPTED = 130


def main() -> None:
    """Run the subcommand and exit with its code."""
    end_on_interrupt()
    # The importer has blocked it until now, where it goes on as this command.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    # Imported here because an interrupt in an import at the top would leave a traceback.
    from services.cli.commands import run  # noqa: PLC0415
    from shared.process.encoding import escape_stdout  # noqa: PLC0415

    escape_stdout()
    try:
        sys.exit(run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    finally:
        # One more must not interrupt what Python does at exit.
        end_on_interrupt()
