"""What a process writes to stderr, written by a thread of its own: no reader can hold the process up."""

from __future__ import annotations

import contextlib
import io
import os
import select
import threading
from collections import deque
from collections.abc import Callable

MAX_WAITING_BYTES = 1 << 20

_ERASE_LINE = b"\r\x1b[K"


class LineWriter:
    """Writes lines to a file descriptor, in order.

    What does not fit the buffer, or cannot be written, is dropped and counted; the count is told in its place as soon
    as something can be written again.
    """

    def __init__(self, fd: int, describe_loss: Callable[[int], str]) -> None:
        """Write to `fd`; `describe_loss` makes the line that tells how many were dropped."""
        self._fd = fd
        self._describe_loss = describe_loss
        # Each with the number of lines that were dropped before it.
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._num_waiting_bytes = 0
        self._num_dropped = 0
        self._is_writing = False
        self._status = b""
        # A signal's handler may write in the middle of a write: the lock can be taken twice.
        self._changed = threading.Condition(threading.RLock())
        threading.Thread(target=self._run, name="stderr", daemon=True).start()

    def write(self, lines: bytes) -> None:
        """Have lines written as a whole or not at all. From any thread; it never waits."""
        with self._changed:
            if self._num_waiting_bytes + len(lines) > MAX_WAITING_BYTES:
                self._num_dropped += lines.count(b"\n")
                return
            self._waiting.append((self._num_dropped, lines))
            self._num_dropped = 0
            self._num_waiting_bytes += len(lines)
            self._changed.notify_all()

    def show(self, status: str) -> None:
        """Keep a text below all lines, or none if it is empty. Only for a terminal: each line erases it first."""
        with self._changed:
            self._status = status.encode()
        self.write(b"")

    def drain(self, timeout_s: float) -> None:
        """Wait until all is written, for `timeout_s` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, timeout_s)

    def _run(self) -> None:
        num_lost = 0
        shown = b""
        while True:
            num_dropped, lines = self._next()
            num_lost += num_dropped
            try:
                if num_lost:
                    self._write_all(f"{self._describe_loss(num_lost)}\n".encode())
                    num_lost = 0
                erase, shown = _ERASE_LINE if shown else b"", self._status
                self._write_all(erase + lines + shown)
            except OSError:
                num_lost += lines.count(b"\n")

    def _next(self) -> tuple[int, bytes]:
        """What is written next; no lines where the last ones were dropped and nothing came after them."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._num_dropped)
            self._is_writing = True
            if not self._waiting:
                num_dropped, self._num_dropped = self._num_dropped, 0
                return num_dropped, b""
            num_dropped, lines = self._waiting.popleft()
            self._num_waiting_bytes -= len(lines)
            return num_dropped, lines

    def _write_all(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                # Whoever shares the file may have made it non-blocking.
                select.select((), (self._fd,), ())


class ErrorStream(io.TextIOBase):
    """`sys.stderr` over a writer: what a library or the interpreter itself writes cannot hold the process up either."""

    encoding = "utf-8"

    def __init__(self, writer: LineWriter, fd: int) -> None:
        self._writer = writer
        self._fd = fd
        self._begun = ""

    def write(self, text: str) -> int:
        """Take a text; a line that it begins waits for its end, or for `flush`."""
        lines, newline, self._begun = (self._begun + text).rpartition("\n")
        if newline:
            self._writer.write(f"{lines}\n".encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Have a line written that was only begun."""
        if self._begun:
            begun, self._begun = self._begun, ""
            self._writer.write(begun.encode(errors="backslashreplace"))

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor itself, which may block."""
        return self._fd

    def isatty(self) -> bool:
        """Whether a person reads it."""
        with contextlib.suppress(OSError):
            return os.isatty(self._fd)
        return False
