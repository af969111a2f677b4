"""Log records as one line each: a text for people, or JSON for machines; fields travel in `extra`.

Prompt text, completions, token ids and stop strings are never logged, at any level.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(*, service: str, level: str, log_format: str) -> None:
    """Write the process's log to stderr.

    Args:
        service: The role's name, on every record.
        level: The least severe level that is written.
        log_format: "text" or "json".
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


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


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
