"""When a worker counts as hung."""

from __future__ import annotations

from collections import deque

from services.scheduler.core.batch.step import StepRecord
from shared.step.step import StepKind

# The first step of a kind compiles kernels and captures graphs.
FIRST_STEP_S = 600.0
MIN_STEP_S = 10.0
SLOWNESS_FACTOR = 10.0


class StepDeadline:
    """Watches the oldest step in flight of one epoch.

    The step may take `max(10 s, 10 * predicted)` since it was sent, the previous result, or the worker's last progress,
    whichever is latest. The prediction is its tokens times the slowest time per token seen for its kind of step. The
    first step of each kind gets 600 s.
    """

    def __init__(self, in_flight: deque[StepRecord]) -> None:
        self._in_flight = in_flight
        self._slowest_s_per_token: dict[StepKind, float] = {}
        self._last_result_at = float("-inf")
        self._last_progress_at = float("-inf")

    @property
    def time(self) -> float | None:
        """When the worker counts as hung unless it makes progress; None when no step is in flight."""
        if not self._in_flight:
            return None
        oldest = self._in_flight[0]
        return max(self._began_at(oldest), self._last_progress_at) + self._allowed_s(oldest)

    def on_progress(self, now: float) -> None:
        """Note that the worker is making progress."""
        self._last_progress_at = now

    def extend(self, pause_s: float, now: float) -> None:
        """Ignore the last `pause_s` seconds, when this process was not listening."""
        if self._in_flight:
            since = max(self._began_at(self._in_flight[0]), self._last_progress_at)
            self._last_progress_at = min(now, since + pause_s)

    def on_result(self, now: float) -> None:
        """Learn from the oldest step in flight; call it before its record is removed."""
        record = self._in_flight[0]
        s_per_token = (now - self._began_at(record)) / record.num_tokens
        if s_per_token > self._slowest_s_per_token.get(record.kind, -1.0):
            self._slowest_s_per_token[record.kind] = s_per_token
        self._last_result_at = now

    def _began_at(self, record: StepRecord) -> float:
        return max(record.sent_at, self._last_result_at)

    def _allowed_s(self, record: StepRecord) -> float:
        slowest = self._slowest_s_per_token.get(record.kind)
        if slowest is None:
            return FIRST_STEP_S
        return max(MIN_STEP_S, SLOWNESS_FACTOR * record.num_tokens * slowest)
