"""The cell's events as scheduler.proto has them."""

from __future__ import annotations

import time
from collections.abc import Callable

from google.protobuf.timestamp_pb2 import Timestamp

from lockstep.v1 import scheduler_pb2
from services.scheduler.cell.domains.history import CellEvent


class EventClock:
    """The monotonic clock of a cell, as the time of day that it had when this began."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """`monotonic` is the clock of the engine's moments."""
        self._monotonic = monotonic
        self._offset_s = time.time() - monotonic()

    def now(self) -> Timestamp:
        """The present moment."""
        return self.at(self._monotonic())

    def at(self, moment: float) -> Timestamp:
        """A moment of the monotonic clock, in whole milliseconds."""
        timestamp = Timestamp()
        timestamp.FromMilliseconds(round((moment + self._offset_s) * 1000))
        return timestamp


def describe_event(event: CellEvent, clock: EventClock) -> scheduler_pb2.CellEvent:
    """An event as a message."""
    described = scheduler_pb2.CellEvent(
        number=event.number,
        time=clock.at(event.at),
        kind=f"KIND_{event.kind.name}",
        dp_ranks=event.ranks,
        num_requests=event.num_requests,
        reason=event.reason,
    )
    if event.duration_s is not None:
        described.duration.FromMilliseconds(round(event.duration_s * 1000))
    return described
