"""A worker with another model waits while the cell has its own; when it has none any more, the scheduler ends."""

from __future__ import annotations

from services.scheduler.cell.events import DropDomain, Exit
from services.scheduler.cell.model_change import CHANGE_S
from services.scheduler.core.policy import CellTopology
from tests.support.scheduler.engine_driver import EngineDriver

TWO_RANKS = CellTopology(dp_size=2)
PROMPT = [11, 12, 13, 14]
OTHER = {"model_digest": "other"}


def offer_other(driver: EngineDriver, domain: int = 0) -> list[object]:
    """Attach a domain with another model; what follows but for deliveries."""
    return [action for action in driver.attach(domain, **OTHER) if isinstance(action, DropDomain | Exit)]


def drop_of(actions: list[object]) -> DropDomain:
    [drop] = actions
    assert isinstance(drop, DropDomain)
    return drop


def test_an_odd_worker_is_offered_again_after_growing_delays_and_disturbs_nothing() -> None:
    driver = EngineDriver(topology=TWO_RANKS, attach=False)
    driver.attach(0)
    driver.submit(1, PROMPT, max_tokens=2)
    drops = [drop_of(offer_other(driver, 1)) for _ in range(6)]
    assert [drop.retry_s for drop in drops] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert [drop.is_repeated for drop in drops] == [False, True, True, True, True, True]
    assert not driver.choices
    # It has its first delay again once it has served.
    driver.attach(1)
    driver.lose(1)
    assert drop_of(offer_other(driver, 1)).retry_s == 0.5


def test_when_only_another_model_is_offered_requests_end_and_so_does_the_scheduler() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, max_tokens=2)
    driver.lose()
    driver.submit(2, PROMPT, max_tokens=2)
    assert drop_of(offer_other(driver)).retry_s == 0.5
    driver.now += CHANGE_S - 1.0
    drop_of(offer_other(driver))
    assert not driver.choices
    driver.now += 1.0
    drop, end = offer_other(driver)
    assert (type(drop), end) == (DropDomain, Exit("the workers serve another model now"))
    reasons = [choice.end and choice.end.error and choice.end.error.reason for choice in driver.choices.values()]
    assert reasons == ["MODEL_CHANGED", "MODEL_CHANGED"]
    assert driver.attach(0) == [end]


def test_other_weights_are_another_model_unless_they_are_not_reported() -> None:
    driver = EngineDriver(topology=CellTopology(dp_size=3), attach=False)
    # A worker of an earlier release.
    driver.attach(0)
    assert driver.engine.facts.weights_digest == ""
    driver.attach(1, weights_digest="a")
    assert driver.engine.facts.weights_digest == "a"
    actions = driver.attach(2, weights_digest="b")
    assert [type(action) for action in actions] == [DropDomain]
    # The first ones are what counts, even after they were lost.
    driver.lose(0)
    driver.lose(1)
    assert DropDomain in [type(action) for action in driver.attach(2, weights_digest="b")]
    driver.attach(2, weights_digest="a")
    driver.attach(0)
    assert [rank.is_attached for rank in driver.engine.state().ranks] == [True, False, True]
    assert (driver.engine.facts.weights_digest, driver.engine.state().counters.num_refused_models) == ("a", 2)


def test_a_worker_that_returns_in_time_is_no_change() -> None:
    driver = EngineDriver(topology=TWO_RANKS, attach=False)
    driver.attach(0)
    driver.lose(0)
    for _ in range(3):
        drop_of(offer_other(driver, 1))
        driver.now += CHANGE_S - 1.0
        driver.attach(0)
        drop_of(offer_other(driver, 1))
        driver.lose(0)
    assert driver.engine.state().counters.num_refused_models == 6
