"""The service's side of the processes in which templates are rendered."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from typing import Any

from services.tokenizer.chat.render_frames import receive_frame, send_frame
from shared.process.parent import leave_end_to_parent

# A timeout of 0 would mean not to wait at all, even for what is there.
_MIN_TIMEOUT_S = 0.01

# Only a process that hangs does not read for so long.
_SEND_TIMEOUT_S = 60.0

_MODULE = "services.tokenizer.chat.render_process"


class ChildEndedError(Exception):
    """A child ended before it answered.

    Attributes:
        code: Its exit code, or minus the number of the signal that killed it; None if that is not known.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the rendering process ended with {'an unknown code' if code is None else code}")
        self.code = code


class RenderChild:
    """A process that answers one request at a time, as `render_child` says."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._num_unread = 0
        self._is_last = False

    @property
    def is_usable(self) -> bool:
        """Whether it takes another request."""
        return not self._is_last

    def begin(self, request: dict[str, Any]) -> None:
        """Send a request whose answer is not needed; the next `ask` waits for it."""
        # If the process has ended or hangs, the next read notices.
        with contextlib.suppress(ConnectionError, TimeoutError):
            send_frame(self._connection, request)
        self._num_unread += 1

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            ChildEndedError: the process ended.
            TimeoutError: the answer did not come within `timeout_s`; the process can only be closed.
        """
        deadline = time.monotonic() + timeout_s
        self._connection.settimeout(timeout_s)
        while self._num_unread:
            self._receive(deadline)
            self._num_unread -= 1
        with contextlib.suppress(ConnectionError):
            send_frame(self._connection, request)
        return self._receive(deadline)

    def close(self) -> None:
        """Have the process killed, whatever it does."""
        self._connection.close()

    def _receive(self, deadline: float) -> dict[str, Any]:
        self._connection.settimeout(max(_MIN_TIMEOUT_S, deadline - time.monotonic()))
        try:
            answer = receive_frame(self._connection)
        except ConnectionError:
            answer = None
        if answer is None or "ended" in answer:
            raise ChildEndedError(None if answer is None else answer["ended"])
        self._is_last = answer["is_last"]
        return answer


class RenderServer:
    """The process that forks children. It ends with this one, and its children end with it."""

    def __init__(self) -> None:
        """Start it, without waiting until it can fork.

        It is killed when the thread that started it ends.
        """
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_SEND_TIMEOUT_S)
        with theirs, leave_end_to_parent():
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_environment(),
            )

    def fork(self, setup: dict[str, Any]) -> RenderChild:
        """Ask for a child, without waiting for it.

        Args:
            setup: The templates, as `render_child` says.

        Raises:
            OSError: the server has ended, or hangs.
        """
        ours, theirs = socket.socketpair()
        ours.settimeout(_SEND_TIMEOUT_S)
        try:
            with theirs:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            # Until the child exists, the buffer may be too small for a large template.
            send_frame(ours, setup)
        except OSError:
            ours.close()
            raise
        return RenderChild(ours)

    def close(self) -> None:
        """Kill it and its children."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> RenderServer:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _environment() -> dict[str, str]:
    # Templates write dates. BLAS threads would make a fork unsafe, and transformers' warnings have another format.
    zone = {"TZ": os.environ["TZ"]} if "TZ" in os.environ else {}
    return {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OPENBLAS_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        **zone,
    }
