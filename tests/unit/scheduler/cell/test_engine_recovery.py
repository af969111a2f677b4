"""Bugs found by the simulation, each reduced to a minimal case."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.cell.events import ClientMessage, Submission
from services.scheduler.core.policy import SchedulerPolicy
from shared.ids import RequestHandle
from shared.request.sampling_params import SamplingParams
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EngineDriver, token_bytes


def make_prompt(num_tokens: int, start: int) -> list[int]:
    return [start + index for index in range(num_tokens)]


def make_submission(handle: int, prompt: list[int], max_tokens: int) -> Submission:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Submission(RequestHandle(handle), f"r{handle}", token_bytes(prompt), params)


def test_a_step_whose_decodes_all_sit_out_has_prompts_only() -> None:
    """The worker refuses a prefill step that names decodes, which would end its epoch."""
    policy = SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=32, enable_mixed_steps=True)
    driver = EngineDriver(policy=policy, num_blocks=5, depth=2)
    prompts = {1: make_prompt(15, 100), 2: make_prompt(15, 300), 3: make_prompt(40, 500)}
    max_tokens = {1: 4, 2: 2, 3: 1}
    driver.on_event(
        ClientMessage(1, [make_submission(handle, prompt, max_tokens[handle]) for handle, prompt in prompts.items()])
    )
    # 1 needs a block that is about to be freed by 2, whose last row is in flight; the rest of 3 needs no block.
    driver.run()
    for handle, prompt in prompts.items():
        assert driver.choices[1, handle].tokens == expected_completion(prompt, 0, max_tokens[handle])


def test_a_row_of_an_attempt_that_was_replaced_does_not_clear_the_present_one() -> None:
    driver = EngineDriver()
    submission = make_submission(1, make_prompt(5, 100), max_tokens=8)
    driver.on_event(ClientMessage(1, [submission]))
    driver.lose()
    driver.attach()
    driver.step()
    # A decode of the trial is in flight.
    driver.on_event(ClientMessage(1, [replace(submission, handle=RequestHandle(2), attempt=2)]))
    driver.step()
    assert driver.engine.state().num_suspects == 1
    driver.run()
    assert driver.engine.state().num_suspects == 0
    assert driver.choices[1, 2].tokens == expected_completion(make_prompt(5, 100), 0, 8)
