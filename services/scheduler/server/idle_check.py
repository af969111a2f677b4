"""The integrity check that runs while the cell is idle."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from services.scheduler.cell.engine import Engine

logger = logging.getLogger(__name__)

MIN_IDLE_S = 1.0
# A check costs at most 1.2 µs per block, so with one millisecond of idleness per block it takes a thousandth of the
# idle time.
IDLE_S_PER_BLOCK = 1e-3


class Timers(Protocol):
    """The part of an event loop used here."""

    def time(self) -> float:
        """Now, in seconds."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> object:
        """Call back after `delay` seconds; the result can be cancelled."""


class IdleCheck:
    """Checks the engine's integrity once per idle period, and logs when that fails.

    The cell is idle once nothing is running or waiting and no event has come for a second, or for a millisecond per
    block if that is longer, since the check blocks the event loop. While events come, a timer runs at most once per
    such period; none runs after the check.
    """

    def __init__(self, engine: Engine, timers: Timers) -> None:
        self.num_checks = 0
        self.num_failures = 0
        self._engine = engine
        self._timers = timers
        self._is_armed = False
        self._last_event_at = 0.0
        self._last_problem: str | None = None

    def on_event(self, now: float) -> None:
        """Note that the engine handled an event."""
        self._last_event_at = now
        if not self._is_armed:
            self._arm(self._idle_s())

    def _arm(self, delay_s: float) -> None:
        self._is_armed = True
        self._timers.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._is_armed = False
        state = self._engine.state()
        if state.num_waiting or state.num_running:
            # The event that ends this work sets the timer again.
            return
        missing_s = self._last_event_at + self._idle_s() - self._timers.time()
        if missing_s > 0:
            self._arm(missing_s)
        else:
            self._check()

    def _check(self) -> None:
        self.num_checks += 1
        try:
            self._engine.check_integrity()
        except (AssertionError, LookupError) as error:
            # If structures disagree, a key of one may be missing in another: hence LookupError.
            self.num_failures += 1
            problem = f"{type(error).__name__}: {error}"
            if problem != self._last_problem:
                logger.error("the integrity check failed", extra={"problem": problem}, exc_info=error)
            self._last_problem = problem

    def _idle_s(self) -> float:
        return max(MIN_IDLE_S, self._engine.state().num_blocks * IDLE_S_PER_BLOCK)
