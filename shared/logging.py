"""Log records as one line each: a text for people, or JSON for machines; fields travel in `extra`.

Prompt text, completions, token ids and stop strings are never logged, at any level.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from shared.line_writer import ErrorStream, LineWriter

# For what is still to be written when the process ends.
_LAST_WORDS_S = 1.0

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(*, service: str, level: str, log_format: str) -> LineWriter:
    """Write the process's log to stderr, and all else that goes there in the same way: nobody ever waits for a reader.

    Args:
        service: The role's name, on every record.
        level: The least severe level that is written.
        log_format: "text" or "json".

    Returns:
        What writes to stderr from now on, for lines that are no records.
    """
    formatter = JsonFormatter(service) if log_format == "json" else TextFormatter(service)
    fd = _stderr_fd()

    def describe_loss(num_lines: int) -> str:
        fields = {"levelno": logging.WARNING, "levelname": "WARNING", "num_lines": num_lines}
        return formatter.format(logging.makeLogRecord({"msg": "lines could not be written", **fields}))

    writer = LineWriter(fd, describe_loss)
    sys.stderr = ErrorStream(writer, fd)
    handler = _WriterHandler(writer)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return writer


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO scheduler: message name=value ...`"""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {service}: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """The record's line with its fields behind it."""
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        return super().formatMessage(record) + fields


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON: time in seconds since the epoch, level, service, message, fields."""
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
    """Has records written by a `LineWriter`."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record; it waits for nothing."""
        try:
            self._writer.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        except Exception:  # noqa: BLE001 - a record that cannot be formatted is told, as by the library's own handlers
            self.handleError(record)

    def flush(self) -> None:
        """Wait a moment for what was taken to be written: `logging.shutdown` asks for it when the process ends."""
        self._writer.drain(_LAST_WORDS_S)


def _stderr_fd() -> int:
    """Where stderr goes; nowhere if it was closed before the process began."""
    # The number may belong to something else by now.
    return os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else sys.stderr.fileno()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
