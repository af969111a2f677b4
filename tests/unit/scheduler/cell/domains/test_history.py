"""The events of a cell, as the engine records them."""

from __future__ import annotations

from services.scheduler.cell.domains.history import MAX_EVENTS, CellEvent, EventKind
from services.scheduler.cell.events import DrainRank, UndrainRank
from services.scheduler.core.policy import CellTopology
from shared.ids import DpRank
from tests.support.scheduler.engine_driver import EngineDriver

PROMPT = [5] * 40


def events(driver: EngineDriver) -> tuple[CellEvent, ...]:
    return driver.engine.state().events


def kinds(driver: EngineDriver) -> list[str]:
    return [event.kind.name for event in events(driver)]


def test_a_loss_is_followed_by_what_became_of_its_ranks_and_requests() -> None:
    driver = EngineDriver(topology=CellTopology(dp_size=2))
    driver.submit(1, PROMPT, max_tokens=8)
    driver.step()
    driver.lose(0)
    lost, suspected, *_ = events(driver)[2:]
    assert (lost.kind, lost.ranks, lost.reason) == (EventKind.LOST, (0,), "a link broke")
    assert (suspected.kind, suspected.ranks, suspected.num_requests) == (EventKind.SUSPECTED, (0,), 1)
    driver.run()
    driver.attach(0)
    assert kinds(driver)[4:] == ["TRIED", "RESUMED", "CLEARED", "ATTACHED"]
    tried, resumed, _, attached = events(driver)[4:]
    assert (tried.ranks, tried.num_requests) == ((1,), 1)
    assert resumed.duration_s == resumed.at - lost.at > 0
    assert (attached.ranks, attached.duration_s) == ((0,), attached.at - lost.at)
    assert [event.duration_s for event in events(driver)[:2]] == [None, None], "nothing was attached before"


def test_a_request_that_crashes_its_workers_twice_is_told() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, max_tokens=8)
    driver.lose()
    driver.attach()
    driver.lose()
    assert kinds(driver) == ["ATTACHED", "LOST", "SUSPECTED", "ATTACHED", "TRIED", "LOST", "POISONED", "RESUMED"]


def test_a_drain_is_told_once_with_its_reason() -> None:
    driver = EngineDriver()
    for event in (DrainRank(DpRank(0)), DrainRank(DpRank(0)), UndrainRank(DpRank(0)), UndrainRank(DpRank(0))):
        driver.on_event(event)
    driver.leave()
    driver.run()
    assert kinds(driver) == ["ATTACHED", "DRAINING", "UNDRAINED", "DRAINING", "RELEASED"]
    assert [event.reason for event in events(driver) if event.reason] == [
        "an operator asked for it",
        "its workers were asked to end",
    ]


def test_only_the_last_events_are_kept_and_none_is_of_a_step() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, max_tokens=100)
    driver.run()
    assert kinds(driver) == ["ATTACHED"]
    for _ in range(MAX_EVENTS):
        driver.on_event(DrainRank(DpRank(0)))
        driver.on_event(UndrainRank(DpRank(0)))
    numbers = [event.number for event in events(driver)]
    assert numbers == list(range(MAX_EVENTS + 2, 2 * MAX_EVENTS + 2))
