"""The service's side of the processes in which templates are rendered."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from services.tokenizer.forks.forking_process import ForkingProcess
from services.tokenizer.forks.frames import receive_bytes, receive_frame, send_frame

# A timeout of 0 would mean not to wait at all, even for what is there.
_MIN_TIMEOUT_S = 0.01

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
        answer, text = None, None
        with contextlib.suppress(ConnectionError):
            answer = receive_frame(self._connection)
            if answer is not None and "ended" not in answer:
                text = receive_bytes(self._connection, answer["num_text_bytes"])
        if answer is None or text is None:
            raise ChildEndedError(None if answer is None else answer.get("ended"))
        self._is_last = answer["is_last"]
        return {**answer, "text": text.decode()} if text else answer


class RenderServer(ForkingProcess):
    """The process that forks children. It ends with this one, and its children end with it."""

    def __init__(self) -> None:
        """Start it; see `ForkingProcess`."""
        # BLAS threads would make a fork unsafe, and transformers' warnings have another format.
        super().__init__(_MODULE, {"OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"})

    def fork(self, setup: dict[str, Any]) -> RenderChild:
        """Ask for a child, without waiting for it.

        Args:
            setup: The templates, as `render_child` says.

        Raises:
            OSError: the server has ended, or hangs.
        """
        connection = self.connect()
        try:
            # Until the child exists, the buffer may be too small for a large template.
            send_frame(connection, setup)
        except OSError:
            connection.close()
            raise
        return RenderChild(connection)
