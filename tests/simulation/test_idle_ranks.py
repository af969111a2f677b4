"""Coupled ranks of which one has all the work while the others stay idle for a long time."""

from __future__ import annotations

import pytest

from services.scheduler.core.policy import CellTopology
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EngineDriver

DP_SIZE = 3
NUM_BLOCKS = 24
MAX_TOKENS = 40
PROMPT = list(range(40))


def serve_one_after_the_other(num_steps: int) -> None:
    """Serve requests that all share a prompt, one at a time, until the ranks have run `num_steps` steps together."""
    driver = EngineDriver(num_blocks=NUM_BLOCKS, depth=2, topology=CellTopology(DP_SIZE, is_coupled=True))
    num_served = num_run = num_dummies = 0
    while num_run < num_steps:
        driver.submit(num_served, PROMPT, seed=num_served, max_tokens=MAX_TOKENS)
        while any(driver.sent_to.values()):
            newest = [driver.sent_to[rank][0] for rank in range(DP_SIZE)]
            assert len({(step.step_id, step.num_tokens_across_dp, step.graph_batch_size) for step in newest}) == 1
            num_run += 1
            num_dummies += sum(step.batch.is_dummy for step in newest)
            for rank in range(DP_SIZE):
                driver.step(rank)
        output = driver.choices.pop((1, num_served))
        assert output.tokens == expected_completion(PROMPT, num_served, MAX_TOKENS)
        num_served += 1
        state = driver.engine.state()
        assert (state.num_used_blocks, state.num_running, state.num_waiting) == (0, 0, 0)
        driver.delivered.clear()
        driver.actions.clear()
    # The rank with the prompt's cached blocks gets all the work.
    assert num_dummies == (DP_SIZE - 1) * num_run


def test_ranks_that_are_idle_neither_deadlock_nor_leak() -> None:
    serve_one_after_the_other(400)


@pytest.mark.proof
def test_ranks_that_are_idle_for_long_neither_deadlock_nor_leak() -> None:
    serve_one_after_the_other(10_000)
