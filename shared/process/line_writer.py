"""Writes a process's stderr from a thread, so that a slow reader cannot block the process."""

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

    Lines that do not fit into the buffer, or cannot be written, are dropped; a line with their number replaces them
    once writing works again.
    """

    def __init__(self, fd: int, describe_loss: Callable[[int], str]) -> None:
        """`describe_loss` makes the line with the number of dropped lines."""
        self._fd = fd
        self._describe_loss = describe_loss
        # Each entry has the number of lines that were dropped before it.
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._num_waiting_bytes = 0
        self._num_dropped = 0
        self._is_writing = False
        self._status = b""
        # Reentrant, since a signal handler may write in the middle of a write.
        self._changed = threading.Condition(threading.RLock())
        threading.Thread(target=self._run, name="stderr", daemon=True).start()

    def write(self, lines: bytes) -> None:
        """Queue lines, all or none of them. Thread-safe; never blocks."""
        with self._changed:
            if self._num_waiting_bytes + len(lines) > MAX_WAITING_BYTES:
                self._num_dropped += lines.count(b"\n")
                return
            self._waiting.append((self._num_dropped, lines))
            self._num_dropped = 0
            self._num_waiting_bytes += len(lines)
            self._changed.notify_all()

    def show(self, status: str) -> None:
        """Keep a text below all lines of a terminal; an empty one removes it."""
        with self._changed:
            self._status = status.encode()
        self.write(b"")

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is written, at most `timeout_s`."""
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
                # Another process that shares the file may have made it non-blocking.
                select.select((), (self._fd,), ())


class ErrorStream(io.TextIOBase):
    """`sys.stderr` on top of a writer, so that no output can block."""

    encoding = "utf-8"

    def __init__(self, writer: LineWriter, fd: int) -> None:
        self._writer = writer
        self._fd = fd
        self._begun = ""

    def write(self, text: str) -> int:
        """Write text; an incomplete line is held until it is completed or flushed."""
        lines, newline, self._begun = (self._begun + text).rpartition("\n")
        if newline:
            self._writer.write(f"{lines}\n".encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Write the incomplete line, if any."""
        if self._begun:
            begun, self._begun = self._begun, ""
            self._writer.write(begun.encode(errors="backslashreplace"))

    def writable(self) -> bool:
        """Always True."""
        return True

    def fileno(self) -> int:
        """The underlying descriptor; writing to it may block."""
        return self._fd

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        with contextlib.suppress(OSError):
            return os.isatty(self._fd)
        return False
