"""The last events of a cell in words."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.v1 import scheduler_pb2

_Event = scheduler_pb2.CellEvent
_NUM_SHOWN = 5
_KIND_TO_WORDS = {
    _Event.KIND_ATTACHED: "attached",
    _Event.KIND_LOST: "lost",
    _Event.KIND_RELEASED: "released after a drain",
    _Event.KIND_DRAINING: "draining",
    _Event.KIND_UNDRAINED: "no longer draining",
    _Event.KIND_RESUMED: "all requests of a loss continue",
    _Event.KIND_SUSPECTED: "requests suspected",
    _Event.KIND_TRIED: "suspected requests tried",
    _Event.KIND_CLEARED: "no request is suspected",
    _Event.KIND_POISONED: "a request that crashes its workers ended",
}


def event_lines(state: scheduler_pb2.GetStateResponse) -> Iterator[str]:
    """The last events, oldest first, by UTC."""
    if state.events:
        yield ""
        yield "last events (UTC)"
    for event in state.events[-_NUM_SHOWN:]:
        yield f"{event.time.ToDatetime():%H:%M:%S}  {_describe(event)}"


def _describe(event: scheduler_pb2.CellEvent) -> str:
    ranks = ", ".join(map(str, event.dp_ranks))
    place = f"rank {ranks}: " if len(event.dp_ranks) == 1 else f"ranks {ranks}: " if ranks else ""
    count = f" ({event.num_requests})" if event.num_requests else ""
    # A newer scheduler may tell of what this release does not know.
    words = _KIND_TO_WORDS.get(event.kind, "an event of another kind")
    delay = f" after {event.duration.ToMilliseconds()} ms" if event.HasField("duration") else ""
    return f"{place}{words}{count}{delay}{f': {event.reason}' if event.reason else ''}"
