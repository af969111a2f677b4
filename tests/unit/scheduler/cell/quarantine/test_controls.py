"""A rank shows that it can compute before suspects are tried on it."""

from __future__ import annotations

import pytest

from services.scheduler.core.policy import CellTopology
from shared.step.step import StepKind
from shared.wire import NOT_INTRODUCED
from tests.support.scheduler.engine_driver import EngineDriver

PROMPT = list(range(20))


def crashed_after(num_steps: int, *, num_requests: int = 1) -> EngineDriver:
    """The rank is attached again, after an epoch that was lost in its step `num_steps`."""
    driver = EngineDriver()
    driver.passes_controls = False
    for handle in range(num_requests):
        driver.submit(handle, [handle, *PROMPT], max_tokens=200)
    while driver.sent[0].step_id < num_steps:
        driver.step()
    driver.lose()
    driver.attach()
    return driver


def run_control(driver: EngineDriver) -> list[tuple[StepKind, int]]:
    """Return the control's steps: the kind and the tokens of each."""
    steps = []
    while driver.sent[0].batch.is_dummy:
        assert len(driver.sent) == 1
        steps.append((driver.sent[0].batch.kind, driver.sent[0].batch.num_dummy_tokens))
        driver.step()
    return steps


@pytest.mark.parametrize(("num_steps", "expected"), [(1, 8), (8, 8), (20, 20), (64, 64), (65, 8)])
def test_a_control_is_as_long_as_a_short_epoch_that_crashed(num_steps: int, expected: int) -> None:
    driver = crashed_after(num_steps)
    steps = run_control(driver)
    # As many tokens as the suspect has by then, and one more each time.
    assert steps == [(StepKind.PREFILL, 21 + num_steps - 1), *[(StepKind.DECODE, 1)] * (expected - 1)]
    assert [enter.chunk.num_tokens for enter in driver.sent[0].batch.enters] == [21 + num_steps - 1]


def test_a_failed_control_clears_whom_its_rank_accused() -> None:
    driver = crashed_after(3)
    for _ in range(4):
        driver.lose()
        driver.attach()
        # Neither a control nor a trial: it runs as any other.
        assert not driver.sent[0].batch.is_dummy
        driver.lose()
        driver.attach()
        assert driver.sent[0].batch.is_dummy
    assert driver.engine.state().counters.num_poison_requests == 0


def test_a_request_is_guilty_when_it_crashes_alone_after_a_control_that_did_not() -> None:
    driver = crashed_after(1)
    run_control(driver)
    driver.lose()
    assert driver.engine.state().counters.num_poison_requests == 1


def test_steps_of_other_requests_are_a_control() -> None:
    driver = EngineDriver(topology=CellTopology(dp_size=2))
    driver.passes_controls = False
    for handle in range(2):
        driver.submit(handle, [handle, *PROMPT], max_tokens=200)
    driver.lose(0)
    # A step takes a second, and after a while the busy rank is emptied for the suspect.
    shown = []
    while not driver.engine.state().counters.num_suspect_trials:
        shown.append(driver.sent_to[1][0].batch.is_dummy)
        driver.step(1)
    num_of_others = shown.index(True)
    assert num_of_others > 1
    assert shown == [False] * num_of_others + [True] * (8 - num_of_others)


def test_a_worker_of_an_older_release_gets_no_control() -> None:
    driver = EngineDriver(attach=False)
    driver.passes_controls = False
    driver.attach(introduction=NOT_INTRODUCED)
    driver.submit(1, PROMPT, max_tokens=200)
    driver.lose()
    driver.attach(introduction=NOT_INTRODUCED)
    assert not driver.sent[0].batch.is_dummy
