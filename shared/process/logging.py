"""Log records as one line of text or JSON each, with fields from `extra`.

Prompt text, completions, token ids and stop strings are never logged, at any level.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from shared.process.line_writer import ErrorStream, LineWriter

# How long the end of the process waits for what is still to be written.
_LAST_WORDS_S = 1.0

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(*, service: str, level: str, log_format: str) -> LineWriter:
    """Send the log, and everything else on stderr, through a `LineWriter`; `log_format` is "text" or "json".

    Returns:
        The writer of stderr, for lines that are not log records.
    """
    fd = _stderr_fd()
    writer = log_to(fd, service=service, level=level, log_format=log_format)
    sys.stderr = ErrorStream(writer, fd)
    return writer


def log_to(fd: int, *, service: str, level: str, log_format: str) -> LineWriter:
    """Send the log alone to a file descriptor, through a `LineWriter`, from now on.

    Returns:
        The writer, for lines that are not log records.
    """
    formatter = JsonFormatter(service) if log_format == "json" else TextFormatter(service)

    def describe_loss(num_lines: int) -> str:
        fields = {"levelno": logging.WARNING, "levelname": "WARNING", "num_lines": num_lines}
        return formatter.format(logging.makeLogRecord({"msg": "lines could not be written", **fields}))

    writer = LineWriter(fd, describe_loss)
    handler = _WriterHandler(writer)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return writer


class TextFormatter(logging.Formatter):
    """Formats a record as `12:00:01 INFO scheduler: message name=value ...`."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {service}: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """The record's line, followed by its fields."""
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return super().formatMessage(record) + fields


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Time in seconds since the epoch, level, service, message, fields."""
        entry: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            "service": self._service,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _WriterHandler(logging.Handler):
    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Never blocks."""
        try:
            self._writer.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        except Exception:  # noqa: BLE001 - a record that cannot be formatted is reported as the library's handlers do
            self.handleError(record)

    def flush(self) -> None:
        """Wait briefly: `logging.shutdown` calls this when the process ends."""
        self._writer.drain(_LAST_WORDS_S)


def _stderr_fd() -> int:
    """/dev/null if stderr was closed before the process started."""
    # In that case descriptor 2 may belong to another file by now.
    return os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
