"""What a discovery heard last, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.cell.events import Endpoint

OnFound = Callable[[tuple[Endpoint, ...]], None]


@dataclass(slots=True)
class LastWord:
    """The last good word of a source of endpoints; what it said counts until the next one."""

    heard_at: float
    """Monotonic seconds; when the process started if there was none yet."""
    endpoints: tuple[Endpoint, ...] | None = None
    """None until the first word."""

    def note(self, endpoints: tuple[Endpoint, ...], now: float, on_found: OnFound) -> None:
        """Take in a word; only news is passed on."""
        self.heard_at = now
        if endpoints != self.endpoints:
            self.endpoints = endpoints
            on_found(endpoints)
