"""The last things that happened to a cell, for people who watch it."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from services.scheduler.cell.domains.domain import Domain
from shared.ids import DpRank

MAX_EVENTS = 64


class EventKind(enum.Enum):
    """What may happen; the names are those of `CellEvent.Kind` of scheduler.proto, which says what they mean."""

    ATTACHED = enum.auto()
    LOST = enum.auto()
    RELEASED = enum.auto()
    DRAINING = enum.auto()
    UNDRAINED = enum.auto()
    RESUMED = enum.auto()
    SUSPECTED = enum.auto()
    TRIED = enum.auto()
    CLEARED = enum.auto()
    POISONED = enum.auto()


@dataclass(frozen=True, slots=True)
class CellEvent:
    """One of them; see scheduler.proto."""

    number: int
    at: float
    """Monotonic seconds."""
    kind: EventKind
    ranks: tuple[DpRank, ...] = ()
    duration_s: float | None = None
    num_requests: int = 0
    reason: str = ""


class History:
    """Keeps the last `MAX_EVENTS` events, which are numbered from 1.

    Nothing is recorded for a step: what is here costs the step path nothing.
    """

    def __init__(self) -> None:
        self._events: deque[CellEvent] = deque(maxlen=MAX_EVENTS)
        self._num_recorded = 0
        self._domain_to_end_at: dict[Domain, float] = {}

    def all(self) -> tuple[CellEvent, ...]:
        """The events, oldest first."""
        return tuple(self._events)

    def record(
        self,
        kind: EventKind,
        now: float,
        domain: Domain | None = None,
        *,
        duration_s: float | None = None,
        num_requests: int = 0,
        reason: str = "",
    ) -> None:
        """Add an event of a domain's ranks, or of the cell."""
        self._num_recorded += 1
        ranks = () if domain is None else tuple(rank.number for rank in domain.ranks)
        self._events.append(CellEvent(self._num_recorded, now, kind, ranks, duration_s, num_requests, reason))

    def record_attached(self, domain: Domain, now: float) -> None:
        """Add that an epoch of a domain began, with the time since its last one ended."""
        ended_at = self._domain_to_end_at.pop(domain, None)
        duration_s = None if ended_at is None else now - ended_at
        self.record(EventKind.ATTACHED, now, domain, duration_s=duration_s)

    def record_end(self, kind: EventKind, domain: Domain, now: float, reason: str = "") -> None:
        """Add that an epoch of a domain ended, as LOST or RELEASED."""
        self._domain_to_end_at[domain] = now
        self.record(kind, now, domain, reason=reason)
