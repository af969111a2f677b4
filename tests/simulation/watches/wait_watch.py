"""Checks which requests end because no worker returns, and when."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.cell.events import Action, Deliver
from tests.simulation.watches.epoch_watch import Entry, Key

_REASON = "WORKERS_LOST"
_BEAT_S = 0.75


class WaitWatch:
    """Follows when workers computed last, as far as an operator's bound on waiting for them goes."""

    def __init__(self, bound_s: float | None) -> None:
        self._bound_s = bound_s
        self._computed_at: float | None = None
        # Since when every check has found the cell without workers, without the time when the scheduler was stopped.
        self._lost_at: float | None = None
        self._last_beat_at: float | None = None

    def note_result(self, now: float) -> None:
        """A step has returned."""
        self._computed_at = now

    def find_ends(
        self, actions: Iterable[Action], live: Iterable[Entry], now: float, *, is_attached: bool
    ) -> tuple[list[Entry], set[Key]]:
        """Check the ends among an event's actions.

        Returns:
            The live choices that end, and the handles of newcomers that are refused.
        """
        if self._computed_at is None:
            self._computed_at = now
        keys: set[Key] = {
            (action.client, end.handle)
            for action in actions
            if isinstance(action, Deliver)
            for end in action.outputs.ends
            if end.error is not None and end.error.reason == _REASON
        }
        entries = [entry for entry in live if entry.key in keys]
        if keys:
            assert self._bound_s is not None, "no operator bounds the wait"
            assert not is_attached, "workers are there"
            since = max([self._computed_at, *(entry.taken_in_at for entry in entries)])
            assert now - since >= self._bound_s, "requests are lost too soon"
        return entries, keys - {entry.key for entry in entries}

    def check_rest(self, live: Iterable[Entry], now: float, *, is_attached: bool, last_beat_at: float) -> None:
        """Check that nothing waits for longer than the bound."""
        pause_s = 0.0 if self._last_beat_at is None else max(0.0, last_beat_at - self._last_beat_at - _BEAT_S)
        self._last_beat_at = last_beat_at
        if is_attached or self._bound_s is None:
            self._lost_at = None
            return
        self._lost_at = now if self._lost_at is None else self._lost_at + pause_s
        for entry in live:
            waited_s = last_beat_at - max(self._lost_at, entry.taken_in_at)
            assert waited_s < self._bound_s + _BEAT_S, "it waits for too long"
