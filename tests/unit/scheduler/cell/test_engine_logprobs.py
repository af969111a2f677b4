"""Log-probabilities through the engine: they match their tokens, and those of prompts arrive once and in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.scheduler.cell.events import DomainLost, DropDomain
from services.scheduler.core.policy import SchedulerPolicy
from shared.request.sampling_params import SamplingOptions
from shared.step.logprobs import Logprobs
from shared.step.step import StepResult
from tests.support.scheduler.cell_model import VOCABULARY, expected_completion
from tests.support.scheduler.engine_driver import EngineDriver, attached, expected_scores, worker_facts

PROMPT = list(range(100, 140))
CHUNKED = SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=18)


def top(num_top: int) -> SamplingOptions:
    """Log-probabilities of completion tokens."""
    return SamplingOptions(num_logprobs=num_top)


def prompt_top(num_top: int) -> SamplingOptions:
    """Log-probabilities of the prompt."""
    return SamplingOptions(num_prompt_logprobs=num_top)


def of_prompt(prompt: list[int], num_top: int) -> list[Any]:
    """The expected log-probabilities of a prompt."""
    return expected_scores(prompt[1:], num_top, start=1, offset=1)


def error_of(driver: EngineDriver, handle: int) -> str:
    end = driver.choices[1, handle].end
    assert end is not None
    assert end.error is not None
    return end.error.reason


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_tokens_get_their_own_log_probabilities_in_any_batch(depth: int, num_draft_tokens: int) -> None:
    driver = EngineDriver(depth=depth, num_draft_tokens=num_draft_tokens)
    # Two clients, with and without, ending at different times: rows leave the batch, and row numbers shift.
    wanted = {1: None, 2: 3, 3: None, 4: 0, 5: 20, 6: 3}
    requested = {4: (9,), 6: (5, 1, 5)}
    for handle, num_top in wanted.items():
        options = None if num_top is None else replace(top(num_top), logprob_token_ids=requested.get(handle, ()))
        prompt = PROMPT[handle:]
        stop = expected_completion(prompt, 0, 3 + handle)[-1]
        driver.submit(handle, prompt, client=handle % 2, max_tokens=20, stop_token_ids=(stop,), options=options)
    driver.run()
    for handle, num_top in wanted.items():
        output = driver.choices[handle % 2, handle]
        assert output.tokens == expected_completion(PROMPT[handle:], 0, 3 + handle)
        expected = []
        if num_top is not None:
            own = requested.get(handle, ())
            expected = expected_scores(output.tokens, num_top, start=40 - handle, requested=own)
        assert output.scores == expected


def test_a_non_finite_row_does_not_shift_its_neighbours_log_probabilities() -> None:
    driver = EngineDriver()
    for handle in range(1, 4):
        driver.submit(handle, PROMPT[handle:], max_tokens=5, options=top(2))
    driver.step()
    driver.step()
    step = driver.sent.pop(0)
    driver.return_result(replace(driver.worker.run(step), not_finite_rows=np.array([0], np.int32)))
    driver.run()
    assert error_of(driver, 1) == "NUMERIC_ERROR"
    for handle in (2, 3):
        tokens = expected_completion(PROMPT[handle:], 0, 5)
        assert driver.choices[1, handle].scores == expected_scores(tokens, 2, start=40 - handle)


def test_requested_tokens_need_no_number_of_log_probabilities() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, max_tokens=4, options=SamplingOptions(logprob_token_ids=(7, 2)))
    driver.run()
    output = driver.choices[1, 1]
    assert output.scores == expected_scores(output.tokens, 0, start=40, requested=(7, 2))


def test_a_step_without_log_probabilities_carries_none() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT)
    driver.submit(2, PROMPT, options=SamplingOptions(min_p=0.1))
    driver.run()
    outputs = [action.outputs for action in driver.delivered]
    assert all(each.logprobs is None and each.counts is None and not each.prompt_logprobs for each in outputs)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 17, 18, 19, 40])
def test_a_prompts_log_probabilities_arrive_once_and_in_order_over_its_chunks(depth: int, length: int) -> None:
    driver = EngineDriver(depth=depth, policy=CHUNKED)
    driver.submit(1, PROMPT[:length], max_tokens=3, options=prompt_top(2))
    driver.run()
    assert driver.choices[1, 1].prompt_scores == of_prompt(PROMPT[:length], 2)
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT[:length], 0, 3)


def test_a_scored_prompt_is_computed_though_it_is_cached_and_its_blocks_are_shared_afterwards() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, max_tokens=2)
    driver.run()
    driver.submit(2, PROMPT, max_tokens=2, options=prompt_top(0))
    driver.run()
    assert (driver.choices[1, 2].num_cached_tokens, driver.choices[1, 2].prompt_scores) == (0, of_prompt(PROMPT, 0))
    driver.engine.flush_prefix_cache()
    driver.submit(3, PROMPT, max_tokens=2, options=prompt_top(0), cache_salt=b"salt")
    driver.run()
    driver.submit(4, PROMPT, max_tokens=2, cache_salt=b"salt")
    driver.submit(5, PROMPT, max_tokens=2)
    driver.run()
    assert [driver.choices[1, handle].num_cached_tokens for handle in (3, 4, 5)] == [0, 32, 0]


def test_the_first_of_several_choices_returns_the_prompts_log_probabilities() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, n=3, max_tokens=2, options=prompt_top(1))
    options = [enter.params.options for enter in driver.sent[0].batch.enters]
    assert options == [prompt_top(1), None, None]
    driver.run()
    outputs = [driver.choices[1, handle] for handle in (1, 2, 3)]
    assert [each.prompt_scores for each in outputs] == [of_prompt(PROMPT, 1), [], []]
    assert [each.num_cached_tokens for each in outputs] == [0, 32, 32]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_recomputed_prompt_sends_no_log_probabilities_twice(depth: int) -> None:
    policy = SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=4, enable_mixed_steps=True)
    driver = EngineDriver(num_blocks=5, depth=depth, policy=policy)
    driver.submit(9, PROMPT[:27], max_tokens=21)
    while not driver.choices:
        driver.step()
    driver.submit(1, PROMPT[::-1], max_tokens=5, options=prompt_top(1))
    driver.run()
    assert driver.engine.state().counters.num_preemptions == 1
    assert driver.choices[1, 1].prompt_scores == of_prompt(PROMPT[::-1], 1)


@pytest.mark.parametrize("steps", range(5))
def test_a_prompt_interrupted_by_a_lost_worker_sends_no_log_probabilities_twice(steps: int) -> None:
    driver = EngineDriver(depth=2, policy=CHUNKED)
    driver.submit(1, PROMPT, max_tokens=4, options=SamplingOptions(num_logprobs=1, num_prompt_logprobs=1))
    for _ in range(steps):
        driver.step()
    driver.on_event(DomainLost(0, 1))
    driver.on_event(attached(worker_facts(epoch=2)))
    # Once one token is known, the whole prompt has been scored, and cached blocks are shared again.
    [enter] = driver.sent[0].batch.enters
    assert enter.params.options is not None
    assert (enter.params.options.num_prompt_logprobs is None) == (steps >= 3)
    driver.run()
    output = driver.choices[1, 1]
    assert (output.prompt_scores, output.scores) == (of_prompt(PROMPT, 1), expected_scores(output.tokens, 1, start=40))


def test_a_preempted_request_with_tokens_shares_its_prompt_again() -> None:
    driver = EngineDriver(num_blocks=7)
    driver.submit(1, PROMPT, max_tokens=50, options=prompt_top(0))
    driver.submit(2, PROMPT[::-1], max_tokens=50, options=prompt_top(0))
    cached: list[int] = []
    while driver.sent:
        cached += [enter.num_cached_tokens for enter in driver.sent[0].batch.enters]
        driver.step()
    assert driver.engine.state().counters.num_preemptions > 0
    assert (cached[:2], min(cached[2:]) > 0) == ([0, 0], True)
    assert driver.choices[1, 2].prompt_scores == of_prompt(PROMPT[::-1], 0)


def test_a_request_aborted_during_its_prompt_receives_nothing_more() -> None:
    driver = EngineDriver(depth=2, policy=CHUNKED)
    driver.submit(1, PROMPT, options=prompt_top(0))
    driver.step()
    driver.abort(1)
    driver.run()
    assert driver.choices[1, 1].prompt_scores == of_prompt(PROMPT, 0)[:17]


def test_scored_prompts_are_admitted_up_to_a_bound_on_their_bytes() -> None:
    # 12 bytes for each of 2 entries at each of 40 positions.
    driver = EngineDriver(policy=SchedulerPolicy(max_prompt_logprob_bytes=2 * 40 * 2 * 12))
    driver.submit(1, PROMPT, max_tokens=2, options=prompt_top(1), n=3)
    driver.submit(11, PROMPT, max_tokens=2, options=prompt_top(1))
    driver.submit(12, PROMPT, options=prompt_top(0))
    driver.submit(13, PROMPT, options=prompt_top(4))
    driver.submit(14, PROMPT, options=top(20))
    assert [error_of(driver, handle) for handle in (12, 13)] == ["QUEUE_FULL", "INVALID_REQUEST"]
    end = driver.choices[1, 12].end
    assert end is not None
    assert end.error is not None
    assert end.error.retry_delay_s is not None
    driver.run()
    driver.submit(21, PROMPT, options=prompt_top(3))
    driver.run()
    assert driver.choices[1, 21].prompt_scores == of_prompt(PROMPT, 3)


def column(*values: int) -> Any:
    return np.array(values, np.int32)


def swap_tokens(logprobs: Logprobs) -> Logprobs:
    """Give each position another position's token."""
    return replace(logprobs, token_ids=logprobs.token_ids[::-1].copy())


def leave_out(logprobs: Logprobs, number: int) -> Logprobs:
    """Remove one of the positions, counted from 1."""
    left = logprobs.select(~np.isin(np.arange(len(logprobs.indexes) + 1), [number + 1]))
    assert left is not None
    return left


WRONG: list[Callable[[Logprobs], Logprobs]] = [
    lambda good: replace(good, indexes=good.indexes[:-1]),
    lambda good: replace(good, values=good.values[:-1]),
    lambda good: replace(good, ranks=good.ranks[:-1]),
    lambda good: replace(good, indexes=good.indexes[::-1].copy()),
    lambda good: replace(good, indexes=good.indexes + 1),
    lambda good: replace(good, indexes=good.indexes - 1),
    lambda good: replace(good, ranks=good.ranks * 0),
    lambda good: replace(good, ranks=good.ranks + VOCABULARY),
    lambda good: replace(good, token_ids=good.token_ids + VOCABULARY),
    lambda good: replace(good, token_ids=good.token_ids - VOCABULARY),
    lambda good: replace(good, counts=good.counts + column(*([1, -1] + [0] * (len(good.counts) - 2)))),
    lambda good: replace(good, counts=good.counts * 0),
]


def assert_dropped(driver: EngineDriver, result: StepResult) -> None:
    assert any(isinstance(action, DropDomain) for action in driver.return_result(result))


WRONG_REQUESTED: list[Callable[[Logprobs], Logprobs]] = [
    lambda good: replace(good, requested_counts=None),
    lambda good: replace(good, requested_counts=column(2)),
    lambda good: replace(good, requested_counts=column(-1, 5)),
    lambda good: replace(good, requested_counts=column(4, 0)),
]


@pytest.mark.parametrize(
    ("spoil", "requested"),
    [*((spoil, ()) for spoil in (*WRONG, swap_tokens)), *((spoil, (3, 4)) for spoil in (*WRONG, *WRONG_REQUESTED))],
)
def test_malformed_log_probability_columns_end_the_epoch(
    spoil: Callable[[Logprobs], Logprobs], requested: tuple[int, ...]
) -> None:
    driver = EngineDriver()
    for handle in (1, 2):
        driver.submit(handle, PROMPT[handle:], options=replace(top(1), logprob_token_ids=requested))
    driver.step()
    driver.step()
    result = driver.worker.run(driver.sent.pop(0))
    assert result.logprobs is not None
    assert len(result.logprobs.indexes) == 2
    assert_dropped(driver, replace(result, logprobs=spoil(result.logprobs)))
    assert [len(driver.choices[1, handle].tokens) for handle in (1, 2)] == [1, 1]


@pytest.mark.parametrize(
    "spoil",
    [
        *WRONG,
        swap_tokens,
        lambda good: replace(leave_out(good, 6), indexes=np.delete(good.indexes, 6)),
    ],
)
def test_malformed_prompt_log_probabilities_end_the_epoch(spoil: Callable[[Logprobs], Logprobs]) -> None:
    driver = EngineDriver(policy=CHUNKED)
    driver.submit(1, PROMPT, options=prompt_top(1))
    result = driver.worker.run(driver.sent.pop(0))
    [(slot, logprobs)] = result.prompt_logprobs
    assert_dropped(driver, replace(result, prompt_logprobs=((slot, spoil(logprobs)),)))
    assert driver.choices == {}


def test_unrequested_repeated_or_unassigned_prompt_log_probabilities_end_the_epoch() -> None:
    for slots in ([1], [0, 0], [5]):
        driver = EngineDriver()
        driver.submit(1, PROMPT, options=prompt_top(1))
        driver.submit(2, PROMPT)
        result = driver.worker.run(driver.sent.pop(0))
        [(slot, logprobs)] = result.prompt_logprobs
        assert slot == 0
        assert_dropped(driver, replace(result, prompt_logprobs=tuple((slot, logprobs) for slot in slots)))
