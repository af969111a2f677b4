"""Why a process ended, as its own output tells: the last line that is no ordinary record of a log."""

from __future__ import annotations

import json
import re

_MAX_LENGTH = 1000

_TEXT_RECORD = re.compile(r"\d\d:\d\d:\d\d (?P<level>[A-Z]+) (?P<service>\w+): (?P<message>.*)")
# As argparse and our own settings write it.
_ERROR = re.compile(r"(?:.*: )?error: (?P<message>.*)")
_ORDINARY_LEVELS = frozenset({"DEBUG", "INFO", "WARNING"})


class LastWords:
    """Takes a process's lines one by one.

    Attributes:
        text: The last that told of trouble, for people; None when no line did.
    """

    def __init__(self) -> None:
        self.text: str | None = None

    def add(self, line: bytes) -> None:
        """Take the next line."""
        text = _trouble_in(line.decode(errors="replace"))
        if text is not None:
            self.text = text[:_MAX_LENGTH]


def _trouble_in(line: str) -> str | None:
    if not line.strip() or line[0].isspace():
        return None
    if record := _TEXT_RECORD.fullmatch(line):
        return None if record["level"] in _ORDINARY_LEVELS else record["message"]
    if line.startswith("{"):
        return _trouble_in_json(line)
    error = _ERROR.fullmatch(line)
    return error["message"] if error else line


def _trouble_in_json(line: str) -> str | None:
    try:
        level = json.loads(line).get("level")
    except ValueError:
        return line
    return None if level in _ORDINARY_LEVELS else line
