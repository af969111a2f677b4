"""The service's side of a process that forks others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Self

from shared.process.parent import leave_end_to_parent

# Only a process that hangs does not read for so long.
_SEND_TIMEOUT_S = 60.0


class ForkingProcess:
    """A process that forks a child for each connection, as `fork_server` does.

    It ends with this one, and its children end with it.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        """Start it, without waiting until it can fork.

        It is killed when the thread that started it ends.

        Args:
            module: What it runs.
            environment: What it needs of it, beside the time zone and the path of modules.
        """
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_SEND_TIMEOUT_S)
        # Templates write dates.
        zone = {"TZ": os.environ["TZ"]} if "TZ" in os.environ else {}
        with theirs, leave_end_to_parent():
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={"PYTHONPATH": os.pathsep.join(sys.path), **zone, **environment},
            )

    def connect(self) -> socket.socket:
        """Ask for a child, without waiting for it; returns the connection to it, whose closing kills it.

        Raises:
            OSError: the process has ended, or hangs.
        """
        ours, theirs = socket.socketpair()
        ours.settimeout(_SEND_TIMEOUT_S)
        try:
            with theirs:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return ours

    def close(self) -> None:
        """Kill it and its children."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()
