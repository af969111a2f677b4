"""The integrity check that runs when the cell is idle, on a clock that the test advances."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from services.scheduler.core.cache.prefix_cache import PrefixCache
from services.scheduler.server.idle_check import IDLE_S_PER_BLOCK, MIN_IDLE_S, IdleCheck
from tests.support.scheduler.engine_driver import EngineDriver


class Clock:
    """Timers that run when the test advances the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        self.timers.append((self.now + delay, callback))

    def advance(self, seconds: float) -> int:
        """Advance the clock; returns how many timers ran."""
        end, num_run = self.now + seconds, 0
        while self.timers and min(self.timers)[0] <= end:
            self.now, callback = self.timers.pop(self.timers.index(min(self.timers)))
            callback()
            num_run += 1
        self.now = end
        return num_run


class IdleCell:
    """An engine with a worker, and its idle check."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.driver = EngineDriver(num_blocks=num_blocks)
        self.clock = Clock()
        self.check = IdleCheck(self.driver.engine, self.clock)

    def on_event(self) -> None:
        self.check.on_event(self.clock.now)

    @property
    def prefixes(self) -> PrefixCache:
        """The bookkeeping that tests corrupt."""
        (rank,) = self.driver.engine._cell.ranks
        return rank.scheduler._blocks._prefixes


def test_an_idle_period_is_checked_once_and_sets_no_further_timer() -> None:
    idleness = IdleCell()
    idleness.on_event()
    assert idleness.clock.advance(MIN_IDLE_S) == 1
    assert (idleness.check.num_checks, idleness.check.num_failures) == (1, 0)
    assert idleness.clock.advance(1e6) == 0
    idleness.on_event()
    idleness.clock.advance(MIN_IDLE_S)
    assert idleness.check.num_checks == 2


def test_nothing_is_checked_before_the_first_event() -> None:
    idleness = IdleCell()
    assert idleness.clock.advance(1e6) == 0


def test_the_idle_period_begins_with_the_last_event() -> None:
    idleness = IdleCell()
    num_timers = 0
    for _ in range(100):
        idleness.on_event()
        num_timers += idleness.clock.advance(0.1 * MIN_IDLE_S)
    assert idleness.check.num_checks == 0
    assert num_timers <= 11
    idleness.clock.advance(0.9 * MIN_IDLE_S)
    assert idleness.check.num_checks == 1


def test_a_busy_cell_is_not_checked_until_it_is_idle() -> None:
    idleness = IdleCell()
    idleness.driver.submit(1, [1, 2, 3])
    idleness.on_event()
    idleness.clock.advance(1e6)
    assert idleness.check.num_checks == 0
    idleness.driver.run()
    idleness.on_event()
    idleness.clock.advance(MIN_IDLE_S)
    assert idleness.check.num_checks == 1


def test_a_large_pool_is_checked_after_a_longer_time() -> None:
    idleness = IdleCell(num_blocks=5000)
    idleness.on_event()
    idleness.clock.advance(5000 * IDLE_S_PER_BLOCK - 0.1)
    assert idleness.check.num_checks == 0
    idleness.clock.advance(0.2)
    assert idleness.check.num_checks == 1


def test_every_failure_is_counted_and_only_the_first_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    idleness = IdleCell()
    idleness.prefixes._unused_ids.append(0)
    for _ in range(3):
        idleness.on_event()
        idleness.clock.advance(MIN_IDLE_S)
    assert (idleness.check.num_checks, idleness.check.num_failures) == (3, 3)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "node ids" in vars(record)["problem"]


def test_bookkeeping_that_cannot_be_compared_is_a_failure_too(caplog: pytest.LogCaptureFixture) -> None:
    idleness = IdleCell()
    idleness.driver.submit(1, list(range(1, 40)))
    idleness.driver.run()
    idleness.prefixes._nodes.clear()
    idleness.on_event()
    idleness.clock.advance(MIN_IDLE_S)
    assert idleness.check.num_failures == 1
    assert "IndexError" in vars(caplog.records[0])["problem"]
