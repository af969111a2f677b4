"""How the engine handles faulty results: invalid as a whole, or only in some rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.cell.events import DropDomain
from services.scheduler.core.batch.step import StepResult
from tests.support.scheduler.cell_model import VOCABULARY, expected_completion
from tests.support.scheduler.engine_driver import EngineDriver


def make_prompt(length: int, start: int = 11) -> list[int]:
    return [(start + 13 * index) % VOCABULARY for index in range(length)]


def error_of(driver: EngineDriver, handle: int) -> str:
    end = driver.choices[1, handle].end
    assert end is not None
    assert end.error is not None
    return end.error.reason


@pytest.mark.parametrize(
    ("step_id", "tokens", "bad_rows"),
    [(2, [1], []), (1, [1, 2], []), (1, [VOCABULARY], []), (1, [-1], []), (1, [], []), (1, [1], [1])],
)
def test_an_invalid_result_reaches_no_client_and_ends_the_epoch(
    step_id: int, tokens: list[int], bad_rows: list[int]
) -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(3))
    result = StepResult(1, step_id, np.array(tokens, np.int32), np.array(bad_rows, np.int32))
    actions = driver.return_result(result)
    assert any(isinstance(action, DropDomain) for action in actions)
    assert (1, 1) not in driver.choices
    state = driver.engine.state()
    assert (state.ready, state.num_waiting, state.counters.num_lost_epochs) == (False, 1, 1)


def test_a_non_finite_row_fails_alone_and_its_blocks_leave_the_cache() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(48), max_tokens=9)
    driver.step()
    driver.submit(2, make_prompt(33, 300), max_tokens=9)
    driver.step()
    driver.step()
    result = driver.worker.run(driver.sent.pop(0))
    row = len(result.token_ids) - 1
    driver.return_result(StepResult(1, result.step_id, result.token_ids, np.array([row], np.int32)))
    assert error_of(driver, 2) == "NUMERIC_ERROR"
    hits = driver.engine.state().counters.num_prefix_hit_tokens
    driver.submit(3, make_prompt(33, 300), max_tokens=1)
    driver.run()
    assert driver.engine.state().counters.num_prefix_hit_tokens == hits
    assert driver.choices[1, 1].tokens == expected_completion(make_prompt(48), 0, 9)


def test_an_invalid_failed_grammar_row_ends_the_epoch() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(3))
    result = StepResult(1, 1, np.array([1], np.int32), np.array([], np.int32))
    actions = driver.return_result(replace(result, failed_grammar_rows=np.array([1], np.int32)))
    assert any(isinstance(action, DropDomain) for action in actions)


def test_a_row_with_a_failed_grammar_fails_alone_and_its_blocks_stay_cached() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(48), max_tokens=9)
    driver.step()
    driver.submit(2, make_prompt(33, 300), max_tokens=9)
    driver.step()
    driver.step()
    result = driver.worker.run(driver.sent.pop(0))
    row = np.array([len(result.token_ids) - 1], np.int32)
    num_tokens = len(driver.choices[1, 2].tokens)
    driver.return_result(replace(result, failed_grammar_rows=row))
    assert error_of(driver, 2) == "INVALID_REQUEST"
    assert len(driver.choices[1, 2].tokens) == num_tokens
    driver.submit(3, make_prompt(33, 300), max_tokens=1)
    driver.run()
    assert driver.choices[1, 3].num_cached_tokens == 32
    assert driver.choices[1, 1].tokens == expected_completion(make_prompt(48), 0, 9)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_non_finite_kv_leaves_the_cache_even_if_its_request_ended_before_it_was_detected(is_aborted: bool) -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(48), max_tokens=9)
    result = driver.worker.run(driver.sent.pop(0))
    if is_aborted:
        driver.abort(1)
    driver.return_result(replace(result, not_finite_rows=np.array([0], np.int32)))
    driver.submit(2, make_prompt(48), max_tokens=1)
    driver.run()
    assert driver.choices[1, 2].num_cached_tokens == 0
    assert ((1, 1) in driver.choices) is not is_aborted
