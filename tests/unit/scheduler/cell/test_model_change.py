"""A worker with another model waits while the cell has its own; when it has none any more, the scheduler ends."""

from __future__ import annotations

from itertools import permutations

import pytest

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


@pytest.mark.parametrize("order", [*permutations(range(3))], ids=str)
def test_workers_of_unequal_contexts_and_pools_serve_the_context_of_the_first(order: tuple[int, ...]) -> None:
    contexts, pools = (512, 512, 400), (64, 20, 40)
    driver = EngineDriver(topology=CellTopology(dp_size=3), attach=False)
    for _ in range(2):
        for rank in order:
            if driver.engine.state().ranks[rank].is_attached:
                driver.lose(rank)
            context, first = contexts[rank], contexts[order[0]]
            actions = driver.attach(rank, context_length=context, num_blocks=pools[rank])
            drops = [action for action in actions if isinstance(action, DropDomain)]
            if context == first:
                assert drops == []
            else:
                reason = f"it serves a context of {context} tokens, the cell one of {first}: all need the same"
                assert drop_of(list(drops)).reason == f"{reason} --max-model-len"
            limits = driver.engine.facts.limits
            assert limits is not None
            assert limits.context_length == first
    same = [rank for rank in range(3) if contexts[rank] == contexts[order[0]]]
    assert [rank for rank in range(3) if driver.engine.state().ranks[rank].is_attached] == same
    assert limits is not None
    assert limits.num_pool_tokens == 16 * min(pools[rank] for rank in same)


def test_a_worker_that_comes_back_with_less_room_is_taken_and_only_what_does_not_fit_ends() -> None:
    driver = EngineDriver(num_blocks=64)
    driver.submit(1, [11] * 300, max_tokens=50)
    driver.submit(2, PROMPT, max_tokens=3)
    driver.lose()
    driver.attach(num_blocks=10)
    driver.run()
    ends = [driver.choices[1, handle].end for handle in (1, 2)]
    assert [end and end.error and end.error.reason for end in ends] == ["KV_CAPACITY_EXCEEDED", None]
    limits = driver.engine.facts.limits
    assert limits is not None
    assert (limits.context_length, limits.num_pool_tokens) == (512, 160)
    # A request may still be within the context, but not in the pool.
    driver.submit(3, [11] * 300, max_tokens=50)
    driver.submit(4, [11] * 300, max_tokens=250)
    reasons = [driver.choices[1, handle].end for handle in (3, 4)]
    assert [end and end.error and end.error.reason for end in reasons] == ["KV_CAPACITY_EXCEEDED", "CONTEXT_EXCEEDED"]
    # With its room back, all of the context is served again.
    driver.lose()
    driver.attach(num_blocks=64)
    driver.submit(5, [11] * 300, max_tokens=5)
    driver.run()
    end = driver.choices[1, 5].end
    assert end is not None
    assert end.error is None


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
