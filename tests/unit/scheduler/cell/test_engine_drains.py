"""Planned stops: a domain that is leaving finishes or hands over its sequences, and no request is suspected for it."""

from __future__ import annotations

import pytest

from services.scheduler.cell.events import DrainRank, DropDomain, ReleaseDomain, TimePassed, UndrainRank
from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from shared.ids import DpRank
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EngineDriver

TWO_RANKS = CellTopology(dp_size=2)
COUPLED = CellTopology(dp_size=2, is_coupled=True)
PROMPT = list(range(11, 51))


def make_driver(topology: CellTopology | None = None, *, drain_s: float = 30.0, depth: int = 2) -> EngineDriver:
    policy = SchedulerPolicy(drain_s=drain_s, max_num_batched_tokens=16)
    return EngineDriver(topology=topology, policy=policy, depth=depth)


def wait(driver: EngineDriver, seconds: float) -> None:
    driver.now += seconds
    driver.on_event(TimePassed())


def check_answer(driver: EngineDriver, handle: int, max_tokens: int = 8) -> None:
    output = driver.choices[1, handle]
    assert output.tokens == expected_completion(PROMPT, handle, max_tokens)
    assert output.end is not None
    assert output.end.error is None


def check_unsuspected(driver: EngineDriver) -> None:
    state = driver.engine.state()
    assert (state.num_suspects, state.counters.num_lost_epochs, state.counters.num_recoveries) == (0, 0, 0)
    assert state.counters.num_suspect_trials == 0


def released(driver: EngineDriver) -> list[ReleaseDomain]:
    return [action for action in driver.actions if isinstance(action, ReleaseDomain)]


@pytest.mark.parametrize("topology", [None, COUPLED], ids=["one rank", "coupled"])
@pytest.mark.parametrize("is_cut", [True, False], ids=["ended by its workers", "drained"])
def test_two_planned_stops_of_a_lone_long_prompt_are_not_held_against_it(
    topology: CellTopology | None, is_cut: bool
) -> None:
    driver = make_driver(topology, drain_s=0.0)
    driver.submit(1, PROMPT, seed=1)
    for _ in range(2):
        driver.leave()
        if is_cut:
            driver.lose()
        else:
            driver.run()
        assert not driver.epochs
        driver.attach()
    driver.run()
    check_answer(driver, 1)
    check_unsuspected(driver)
    assert driver.choices[1, 1].end is not None
    assert driver.choices[1, 1].end.num_resumes == 2


def test_a_crash_after_a_planned_stop_is_suspicious_again() -> None:
    driver = make_driver()
    driver.submit(1, PROMPT, seed=1)
    driver.leave()
    driver.lose()
    driver.attach()
    driver.lose()
    assert driver.engine.state().num_suspects == 1
    assert driver.engine.state().counters.num_lost_epochs == 1


def test_sequences_finish_on_a_domain_that_is_leaving_and_then_its_links_are_closed() -> None:
    driver = make_driver(TWO_RANKS)
    for handle in (1, 2):
        driver.submit(handle, PROMPT, seed=handle)
    driver.leave(1)
    assert [rank.is_draining for rank in driver.engine.state().ranks] == [False, True]
    driver.run()
    check_answer(driver, 1)
    check_answer(driver, 2)
    assert released(driver) == [ReleaseDomain(1, 2)]
    assert [output.end.num_resumes for output in driver.choices.values() if output.end is not None] == [0, 0]
    check_unsuspected(driver)


def test_an_empty_domain_that_is_leaving_is_released_at_once() -> None:
    driver = make_driver(TWO_RANKS)
    assert driver.leave(0) == [ReleaseDomain(0, 1)]


def test_new_requests_and_waiting_ones_go_to_the_domains_that_stay() -> None:
    driver = make_driver(TWO_RANKS)
    for handle in range(1, 9):
        driver.submit(handle, PROMPT, seed=handle)
    driver.leave(0)
    driver.submit(9, PROMPT, seed=9)
    leaving, other = driver.engine.state().ranks
    assert leaving.num_waiting == 0
    assert leaving.num_running + other.num_waiting + other.num_running == 9
    driver.run()
    for handle in range(1, 10):
        check_answer(driver, handle)
    check_unsuspected(driver)


def test_what_has_not_finished_in_time_continues_elsewhere_with_its_tokens() -> None:
    driver = make_driver(TWO_RANKS, drain_s=5.0)
    driver.submit(1, PROMPT, seed=1, max_tokens=40)
    while (1, 1) not in driver.choices or len(driver.choices[1, 1].tokens) < 2:
        driver.step(0)
    driver.leave(0)
    driver.step(0)
    num_in_flight = len(driver.sent_to[0])
    wait(driver, 6.0)
    # The steps in flight return before the sequence moves: none of their tokens is computed again.
    num_tokens = len(driver.choices[1, 1].tokens)
    assert not released(driver)
    for _ in range(num_in_flight):
        driver.step(0)
    assert released(driver) == [ReleaseDomain(0, 1)]
    assert len(driver.choices[1, 1].tokens) == num_tokens + num_in_flight
    assert driver.sent_to[1]
    driver.run()
    check_answer(driver, 1, max_tokens=40)
    check_unsuspected(driver)


def test_with_no_other_domain_the_rest_waits_for_the_restart_and_nothing_is_refused() -> None:
    driver = make_driver(drain_s=0.0)
    driver.submit(1, PROMPT, seed=1)
    driver.leave()
    driver.submit(2, PROMPT, seed=2)
    driver.run()
    state = driver.engine.state()
    assert (state.ready, state.num_waiting) == (False, 2)
    driver.attach()
    driver.run()
    check_answer(driver, 1)
    check_answer(driver, 2)
    check_unsuspected(driver)


def test_a_leaving_domain_that_hangs_is_given_up_as_any_other() -> None:
    driver = make_driver(drain_s=0.0)
    driver.submit(1, PROMPT, seed=1)
    driver.leave()
    driver.silent_ranks.add(0)
    wait(driver, 10.0)
    assert any(isinstance(action, DropDomain) for action in driver.actions)
    assert driver.engine.state().num_suspects == 1


def test_an_operator_drains_a_rank_and_takes_it_back() -> None:
    driver = make_driver(TWO_RANKS)
    driver.submit(1, PROMPT, seed=1)
    driver.on_event(DrainRank(DpRank(0)))
    driver.run()
    check_answer(driver, 1)
    # Its workers stay, without work.
    assert not released(driver)
    driver.submit(2, PROMPT, seed=2)
    assert not driver.sent_to[0]
    driver.run()
    assert [rank.is_draining for rank in driver.engine.state().ranks] == [True, False]
    driver.on_event(UndrainRank(DpRank(0)))
    driver.submit(3, PROMPT, seed=3)
    driver.submit(4, PROMPT, seed=4)
    assert driver.sent_to[0]
    driver.run()
    check_unsuspected(driver)


def test_a_drained_rank_stays_empty_after_its_workers_are_replaced() -> None:
    driver = make_driver(TWO_RANKS)
    driver.on_event(DrainRank(DpRank(0)))
    assert driver.leave(0) == [ReleaseDomain(0, 1)]
    driver.attach(0)
    driver.submit(1, PROMPT, seed=1)
    assert not driver.sent_to[0]
    driver.on_event(UndrainRank(DpRank(0)))
    driver.submit(2, PROMPT, seed=2)
    assert driver.sent_to[0]


def test_what_an_operator_s_drain_does_not_let_finish_moves_too() -> None:
    driver = make_driver(TWO_RANKS, drain_s=0.0)
    driver.submit(1, PROMPT, seed=1, max_tokens=40)
    driver.on_event(DrainRank(DpRank(0)))
    driver.run()
    assert released(driver) == [ReleaseDomain(0, 1)]
    check_answer(driver, 1, max_tokens=40)
    check_unsuspected(driver)


def test_requests_wait_while_every_rank_is_drained_and_continue_when_one_is_taken_back() -> None:
    driver = make_driver()
    driver.on_event(DrainRank(DpRank(0)))
    driver.submit(1, PROMPT, seed=1)
    assert not driver.sent
    driver.on_event(UndrainRank(DpRank(0)))
    driver.run()
    check_answer(driver, 1)


def test_a_drain_that_is_taken_back_in_time_moves_nothing() -> None:
    driver = make_driver(TWO_RANKS, drain_s=0.0)
    driver.submit(1, PROMPT, seed=1)
    driver.on_event(DrainRank(DpRank(0)))
    driver.on_event(UndrainRank(DpRank(0)))
    driver.run()
    assert not released(driver)
    check_answer(driver, 1)
    assert driver.choices[1, 1].end is not None
    assert driver.choices[1, 1].end.num_resumes == 0


def test_suspects_are_not_tried_on_a_domain_that_is_leaving() -> None:
    driver = make_driver(TWO_RANKS)
    driver.submit(1, PROMPT, seed=1)
    driver.submit(2, PROMPT, seed=2)
    driver.leave(1)
    driver.lose(0)
    assert driver.engine.state().num_suspects == 1
    driver.run()
    assert driver.engine.state().num_suspects == 1
    driver.attach(0)
    driver.run()
    check_answer(driver, 1)
    check_answer(driver, 2)
    assert driver.engine.state().num_suspects == 0


def test_a_trial_that_a_planned_stop_interrupts_is_not_held_against_its_suspect() -> None:
    driver = make_driver(drain_s=0.0)
    driver.submit(1, PROMPT, seed=1)
    driver.lose()
    driver.attach()
    assert driver.engine.state().counters.num_suspect_trials == 1
    driver.leave()
    driver.run()
    assert driver.engine.state().num_suspects == 1
    driver.attach()
    driver.run()
    check_answer(driver, 1)
