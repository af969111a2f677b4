"""The bounds of the waiting queue, and the delay that a refused client is told."""

from __future__ import annotations

import pytest

from services.scheduler.drain_rate import MAX_DELAY_S, MIN_DELAY_S, DrainRate
from services.scheduler.events import ClientMessage
from services.scheduler.policy import SchedulerPolicy
from shared.errors import QueueFullError
from tests.support.engine_driver import EngineDriver


def refusal(driver: EngineDriver, handle: int) -> QueueFullError:
    end = driver.told[1, handle].end
    assert end is not None
    assert isinstance(end.error, QueueFullError)
    return end.error


def test_a_full_queue_refuses_at_once_and_disturbs_nobody() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, max_waiting_requests=2))
    for handle in range(5):
        driver.submit(handle, [handle], max_tokens=3)
    # One runs, two wait.
    assert [handle for (_, handle), told in driver.told.items() if told.end] == [3, 4]
    assert refusal(driver, 3).values["num_waiting"] == "2"
    driver.run()
    assert all(len(driver.told[1, handle].tokens) == 3 for handle in range(3))
    driver.submit(5, [5], max_tokens=1)
    driver.run()
    assert len(driver.told[1, 5].tokens) == 1


def test_prompt_tokens_are_bounded_but_one_large_prompt_is_taken_alone() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, max_waiting_tokens=100))
    driver.submit(1, [1], max_tokens=2)
    driver.submit(2, [2] * 150, max_tokens=2)
    driver.submit(3, [3], max_tokens=2)
    assert refusal(driver, 3).values["num_waiting_tokens"] == "150"
    driver.run()
    assert len(driver.told[1, 2].tokens) == 2


def test_aborted_requests_make_room() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, max_waiting_requests=1))
    driver.submit(1, [1], max_tokens=2)
    driver.submit(2, [2], max_tokens=2)
    driver.on_event(ClientMessage(1, aborts=[2]))
    driver.submit(3, [3], max_tokens=2)
    driver.run()
    assert len(driver.told[1, 3].tokens) == 2


def test_preempted_sequences_do_not_count_against_the_bound() -> None:
    driver = EngineDriver(num_blocks=4, policy=SchedulerPolicy(max_num_batched_tokens=600, max_waiting_requests=1))
    driver.submit(1, [1] * 16, max_tokens=40)
    driver.submit(2, [2] * 16, max_tokens=40)
    while not driver.engine.state().counters.num_preemptions:
        driver.step()
    driver.submit(3, [3], max_tokens=2)
    driver.run()
    assert len(driver.told[1, 3].tokens) == 2


def test_the_delay_follows_the_measured_rate() -> None:
    rate = DrainRate()
    assert rate.delay_s(1, 0.0) == MAX_DELAY_S
    for second in range(1, 121):
        rate.note(4, float(second))
    # Four places a second.
    assert rate.delay_s(8, 120.0) == pytest.approx(2.0, rel=0.05)
    assert rate.delay_s(1, 120.0) == pytest.approx(0.25, rel=0.05)
    # It fades when nobody leaves any more.
    assert rate.delay_s(1, 150.0) > 0.6
    assert rate.delay_s(1, 1000.0) == MAX_DELAY_S


def test_the_delay_is_neither_nothing_nor_for_ever() -> None:
    rate = DrainRate()
    rate.note(1_000_000, 1.0)
    assert rate.delay_s(1, 1.0) == MIN_DELAY_S
    assert rate.delay_s(10**12, 1.0) == MAX_DELAY_S
