"""Workers of different releases in one cell: what their requests may need."""

from __future__ import annotations

from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from shared.request.sampling_params import SamplingOptions
from shared.wire import NOT_INTRODUCED, introduce_self, lower_of
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EngineDriver

PROMPT = list(range(100, 120))
OPTIONS = SamplingOptions(num_logprobs=0)
TWO_RANKS = CellTopology(dp_size=2)
OLD = lower_of(introduce_self(), NOT_INTRODUCED)


def reason_of(driver: EngineDriver, handle: int) -> str | None:
    output = driver.choices.get((1, handle))
    return output.end.error.reason if output and output.end and output.end.error else None


def test_a_worker_of_wire_version_0_is_given_no_options() -> None:
    driver = EngineDriver(attach=False)
    assert driver.engine.facts.introduction == introduce_self()
    driver.attach(introduction=NOT_INTRODUCED)
    assert driver.engine.facts.introduction == OLD
    driver.submit(1, PROMPT, max_tokens=3)
    driver.submit(2, PROMPT, max_tokens=3, options=OPTIONS)
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 3)
    assert reason_of(driver, 2) == "NOT_SUPPORTED"


def test_when_an_older_worker_attaches_requests_that_need_more_end_and_others_continue() -> None:
    driver = EngineDriver(topology=TWO_RANKS, attach=False, policy=SchedulerPolicy(max_num_seqs=2))
    driver.attach(0)
    # The first two run, and the others wait.
    for handle in (1, 2, 3, 4):
        driver.submit(handle, PROMPT, max_tokens=4, options=OPTIONS if handle % 2 else None)
    driver.attach(1, introduction=NOT_INTRODUCED)
    assert [reason_of(driver, handle) for handle in (1, 2, 3, 4)] == ["NOT_SUPPORTED", None, "NOT_SUPPORTED", None]
    driver.run()
    for handle in (2, 4):
        assert driver.choices[1, handle].tokens == expected_completion(PROMPT, 0, 4)


def test_an_older_worker_that_is_lost_still_counts_until_a_newer_one_takes_its_place() -> None:
    driver = EngineDriver(topology=TWO_RANKS, attach=False)
    driver.attach(0, introduction=NOT_INTRODUCED)
    driver.attach(1)
    driver.lose(0)
    driver.submit(1, PROMPT, max_tokens=3, options=OPTIONS)
    assert reason_of(driver, 1) == "NOT_SUPPORTED"
    version = driver.engine.facts.version
    driver.attach(0)
    assert driver.engine.facts.introduction == introduce_self()
    assert driver.engine.facts.version > version
    driver.submit(2, PROMPT, max_tokens=3, options=OPTIONS)
    driver.run()
    assert driver.choices[1, 2].tokens == expected_completion(PROMPT, 0, 3)
