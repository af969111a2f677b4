"""What a launcher shows of its processes while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from services.cli.processes.loading_bar import LoadingBar
from shared.process.line_writer import LineWriter


class Display(Protocol):
    """Takes in what happens to the processes, by their names. Called on the event loop."""

    def take(self, name: str, line: bytes) -> bool:
        """Take in a line of a process's output; True if it is shown and the log need not have it."""

    def on_start(self, name: str) -> None:
        """Take in that a process has been started."""

    def on_ready(self, name: str) -> None:
        """Take in that a process serves, for the first time since its start."""

    def on_exit(self, name: str, reason: str | None, delay_s: float | None) -> None:
        """Take in that a process has ended by itself, perhaps while loading.

        Args:
            reason: How it ended; None after a clean end.
            delay_s: When it is restarted; None if it is not.
        """

    def end(self) -> None:
        """Show nothing below the last line any more."""


class LogDisplay(Display):
    """Leaves all but the progress of loading to the log; see `Display`."""

    def __init__(self, show: Callable[[str], None] | None) -> None:
        """`show` keeps a text below the log, as `LineWriter.show`; None where the log's reader is no person."""
        self._bar = None if show is None else LoadingBar(show)

    @override
    def take(self, name: str, line: bytes) -> bool:
        return self._bar is not None and self._bar.take(name, line)

    @override
    def on_start(self, name: str) -> None:
        pass

    @override
    def on_ready(self, name: str) -> None:
        pass

    @override
    def on_exit(self, name: str, reason: str | None, delay_s: float | None) -> None:
        if self._bar is not None:
            self._bar.drop(name)

    @override
    def end(self) -> None:
        if self._bar is not None:
            # Processes still loading are never dropped from the bar, which must not cover the final messages.
            self._bar.end()


@dataclass(frozen=True, slots=True)
class ProcessesOutput:
    """Where the processes' output goes."""

    writer: LineWriter
    has_prefixes: bool
    """Whether the process's name comes before each line. Only text needs it: a JSON record has its service's name."""
    display: Display
