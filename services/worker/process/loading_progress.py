"""Shows how much is loaded."""

from __future__ import annotations

import logging
from typing import Protocol, TextIO

from typing_extensions import override

logger = logging.getLogger(__name__)

_BAR_WIDTH = 40


class Progress(Protocol):
    """Shows how much is loaded."""

    def __call__(self, part: float) -> None:
        """Show `part`, 0 to 1."""

    def close(self) -> None:
        """Loading has ended, complete or not."""


class LoggedProgress(Progress):
    """Writes a log line every 10 %."""

    def __init__(self) -> None:
        self._next_percent = 0

    @override
    def __call__(self, part: float) -> None:
        if part * 100 >= self._next_percent:
            logger.info("loading weights", extra={"percent": int(part * 100)})
            self._next_percent = int(part * 10) * 10 + 10

    @override
    def close(self) -> None:
        pass


class ProgressBar(Progress):
    """One line on a terminal, redrawn every percent."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._percent: int | None = None

    @override
    def __call__(self, part: float) -> None:
        if int(part * 100) == self._percent:
            return
        self._percent = int(part * 100)
        filled = int(part * _BAR_WIDTH)
        self._stream.write(f"\rloading weights [{'#' * filled:{_BAR_WIDTH}}] {self._percent:3} %")
        self._stream.flush()

    def close(self) -> None:
        """See `Progress`; ends the line."""
        if self._percent is not None:
            self._stream.write("\n")


def make_progress(stream: TextIO, *, log_format: str) -> Progress:
    """A bar if the log goes to a terminal `stream` as text; else log lines."""
    return ProgressBar(stream) if log_format == "text" and stream.isatty() else LoggedProgress()
