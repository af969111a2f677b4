"""The set of endpoints that discovery saw last, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.cell.events import Endpoint

OnFound = Callable[[tuple[Endpoint, ...]], None]


@dataclass(slots=True)
class LastSeen:
    """What a source of endpoints reported last, which counts until its next report."""

    seen_at: float
    """Monotonic seconds; when the process started if there was no report yet."""
    endpoints: tuple[Endpoint, ...] | None = None
    """None until the first report."""

    def note(self, endpoints: tuple[Endpoint, ...], now: float, on_found: OnFound) -> None:
        """Record a report; it is passed on only if the endpoints have changed."""
        self.seen_at = now
        if endpoints != self.endpoints:
            self.endpoints = endpoints
            on_found(endpoints)
