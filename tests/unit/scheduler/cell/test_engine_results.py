"""Invalid results: no client sees them, and the epoch ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.cell.events import DropDomain
from shared.step.step import StepResult
from tests.support.scheduler.cell_model import VOCABULARY
from tests.support.scheduler.engine_driver import EngineDriver


def make_prompt(length: int, start: int = 11) -> list[int]:
    return [(start + 13 * index) % VOCABULARY for index in range(length)]


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


def test_an_invalid_failed_grammar_row_ends_the_epoch() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(3))
    result = StepResult(1, 1, np.array([1], np.int32), np.array([], np.int32))
    actions = driver.return_result(replace(result, failed_grammar_rows=np.array([1], np.int32)))
    assert any(isinstance(action, DropDomain) for action in actions)
