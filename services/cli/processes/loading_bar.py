"""One progress bar for all workers of a cell."""

from __future__ import annotations

import re
from collections.abc import Callable

_WIDTH = 40

# The format that `services/worker/process/loading_progress.py` logs.
_PROGRESS = re.compile(rb"\d\d:\d\d:\d\d INFO worker: loading weights percent=(\d+)")


class LoadingBar:
    """Parses the workers' log and shows the slowest that is still loading."""

    def __init__(self, show: Callable[[str], None]) -> None:
        """`show` receives the bar whenever it changes; an empty text removes it."""
        self._show = show
        self._name_to_percent: dict[str, int] = {}
        self._has_ended = False

    def take(self, name: str, line: bytes) -> bool:
        """Parse a line of output; True if the bar shows it."""
        match = _PROGRESS.fullmatch(line)
        if match is None:
            return False
        self._set(name, int(match[1]))
        return True

    def drop(self, name: str) -> None:
        """A process has ended, perhaps while loading."""
        if name in self._name_to_percent:
            self._set(name, 100)

    def end(self) -> None:
        """Remove the bar for good, even if something is still loading."""
        self._has_ended = True
        self._show("")

    def _set(self, name: str, percent: int) -> None:
        self._name_to_percent[name] = percent
        if percent >= 100:
            del self._name_to_percent[name]
        is_shown = bool(self._name_to_percent) and not self._has_ended
        self._show(_draw(min(self._name_to_percent.values())) if is_shown else "")


def _draw(percent: int) -> str:
    return f"loading weights [{'#' * (percent * _WIDTH // 100):{_WIDTH}}] {percent:3} %"
