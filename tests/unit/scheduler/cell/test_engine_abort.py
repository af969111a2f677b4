"""A request that another call aborts by its id, in every state that the request can be in."""

from __future__ import annotations

import pytest

from services.scheduler.cell.events import AbortRequest, Deliver
from services.scheduler.core.policy import SchedulerPolicy
from services.scheduler.core.results.outputs import Outputs
from shared.errors import ErrorCode
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EngineDriver


def abort(driver: EngineDriver, request_id: str) -> list[Outputs]:
    """Abort a request; returns the outputs sent at once."""
    actions = driver.on_event(AbortRequest(request_id))
    return [action.outputs for action in actions if isinstance(action, Deliver)]


def assert_aborted(driver: EngineDriver, handle: int, client: int = 1) -> None:
    end = driver.choices[client, handle].end
    assert end is not None
    assert end.error is not None
    assert (end.error.code, end.error.reason) == (ErrorCode.CANCELLED, "ABORTED_BY_CALL")


def prompt(length: int, start: int = 11) -> list[int]:
    return [(start + 13 * index) % 1000 for index in range(length)]


def test_a_waiting_request_ends_at_once_and_computes_nothing() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1))
    driver.submit(1, prompt(20), max_tokens=3)
    driver.submit(2, prompt(30), max_tokens=3, request_id="other")
    assert len(abort(driver, "other")) == 1
    assert_aborted(driver, 2)
    assert driver.engine.state().num_waiting == 0
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(prompt(20), 0, 3)
    assert driver.worker.num_computed_tokens == 20 + 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_running_request_ends_after_its_tokens_and_its_neighbour_continues(depth: int) -> None:
    driver = EngineDriver(depth=depth)
    driver.submit(1, prompt(20), client=1, max_tokens=20)
    driver.submit(1, prompt(40, 300), client=2, max_tokens=20)
    for _ in range(6):
        driver.step()
    tokens = list(driver.choices[2, 1].tokens)
    assert tokens == expected_completion(prompt(40, 300), 0, len(tokens))
    abort(driver, "2-1")
    assert_aborted(driver, 1, client=2)
    driver.run()
    assert driver.choices[2, 1].tokens == tokens
    assert driver.choices[1, 1].tokens == expected_completion(prompt(20), 0, 20)
    assert driver.engine.state().num_used_blocks == 0


@pytest.mark.parametrize("at", range(8))
def test_a_preempted_request_ends_whether_parked_or_waiting(at: int) -> None:
    driver = EngineDriver(num_blocks=4, depth=3, policy=SchedulerPolicy(max_num_batched_tokens=600))
    driver.submit(1, prompt(16), max_tokens=40)
    driver.submit(2, prompt(16, 500), max_tokens=40)
    while not driver.engine.state().counters.num_preemptions:
        driver.step()
    for _ in range(at):
        driver.step()
    abort(driver, "1-2")
    assert_aborted(driver, 2)
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(prompt(16), 0, 40)
    assert driver.engine.state().num_used_blocks == 0


def test_an_unknown_request_id_is_ignored() -> None:
    driver = EngineDriver()
    assert abort(driver, "unknown") == []
    driver.submit(1, prompt(5), max_tokens=2)
    driver.run()
    assert abort(driver, "1-1") == []
    end = driver.choices[1, 1].end
    assert end is not None
    assert end.error is None


def test_the_id_of_an_aborted_request_can_be_reused() -> None:
    driver = EngineDriver()
    driver.submit(1, prompt(5), request_id="same", max_tokens=9)
    abort(driver, "same")
    driver.submit(2, prompt(5), request_id="same", max_tokens=9)
    driver.run()
    assert driver.choices[1, 2].tokens == expected_completion(prompt(5), 0, 9)


def test_requests_queued_behind_an_aborted_one_are_sent_at_once() -> None:
    driver = EngineDriver(num_blocks=4, depth=2)
    driver.submit(1, prompt(40), max_tokens=1)
    driver.submit(2, prompt(60, 400), max_tokens=4)
    driver.submit(3, prompt(5, 700), max_tokens=4)
    assert len(driver.sent) == 1
    abort(driver, "1-2")
    assert len(driver.sent) == 2
    driver.run()
    assert driver.choices[1, 3].tokens == expected_completion(prompt(5, 700), 0, 4)


def test_the_blocks_of_an_aborted_request_admit_the_next_one() -> None:
    driver = EngineDriver(num_blocks=4)
    driver.submit(1, prompt(60), max_tokens=4)
    driver.submit(2, prompt(50, 400), max_tokens=4)
    assert driver.engine.state().num_waiting == 1
    abort(driver, "1-1")
    driver.run()
    assert driver.choices[1, 2].tokens == expected_completion(prompt(50, 400), 0, 4)
