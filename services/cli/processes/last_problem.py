"""Why a process ended, according to its own output."""

from __future__ import annotations

import json
import re

_MAX_LENGTH = 1000

_TEXT_RECORD = re.compile(r"\d\d:\d\d:\d\d (?P<level>[A-Z]+) (?P<service>\w+): (?P<message>.*)")
# As argparse and `load_settings` write it.
_ERROR = re.compile(r"(?:.*: )?error: (?P<message>.*)")
_ORDINARY_LEVELS = frozenset({"DEBUG", "INFO", "WARNING"})


class LastProblem:
    """Reads a process's output.

    `text` is the last line that reported a problem, shortened; None if none did.
    """

    def __init__(self) -> None:
        self.text: str | None = None

    def add(self, line: bytes) -> None:
        """Process the next line."""
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
