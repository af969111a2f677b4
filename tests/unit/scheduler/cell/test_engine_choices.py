"""Requests with several choices: each choice is a separate sequence, and they share their prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.cell.events import (
    AbortRequest,
    ChoiceSoFar,
    ClientClosed,
    ClientMessage,
    CloseClient,
    DomainLost,
    SendStep,
    Submission,
    TimePassed,
)
from services.scheduler.core.batch.sequence import FinishReason
from services.scheduler.core.policy import SchedulerPolicy
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from shared.ids import RequestHandle
from shared.request.sampling_params import SamplingParams
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import ChoiceOutput, EngineDriver, attached, token_bytes, worker_facts

# Two full blocks of 16 and part of a third.
PROMPT = list(range(100, 140))


def completion(choice: int, num_tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    return expected_completion(prompt, 0, num_tokens, choice)


def end_of(driver: EngineDriver, handle: int) -> FinishReason | str | None:
    """Why a choice finished, or the reason of its error; None while it is running."""
    end = driver.choices[1, handle].end if (1, handle) in driver.choices else None
    if end is None:
        return None
    if end.finish is not None:
        return end.finish.reason
    assert end.error is not None
    return end.error.reason


def submission(handle: int = 1, n: int = 3, **changes: object) -> Submission:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    made = Submission(RequestHandle(handle), "r", token_bytes(PROMPT), params, n=n)
    return replace(made, **changes)  # type: ignore[arg-type]


def resume(driver: EngineDriver, resumed: Submission) -> None:
    """Submit a later attempt under other handles; its client already has the output so far."""
    for choice, so_far in enumerate(resumed.choices_so_far):
        output = np.frombuffer(so_far.output, np.int32).tolist()
        driver.choices[1, resumed.handle + choice] = ChoiceOutput(output, num_cached_tokens=0 if output else None)
    driver.on_event(ClientMessage(1, [resumed]))


def entered(driver: EngineDriver) -> list[list[tuple[int, int]]]:
    """Run to the end; for each step with prompts, returns the choices that enter and their cached tokens."""
    steps = []
    while driver.sent:
        enters = driver.sent[0].batch.enters
        if enters or driver.sent[0].batch.chunks:
            steps.append([(enter.choice, enter.num_cached_tokens) for enter in enters])
        driver.step()
    return steps


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_choice_has_its_own_answer_under_its_own_handle(depth: int) -> None:
    driver = EngineDriver(depth=depth)
    driver.submit(5, PROMPT, n=3, max_tokens=10)
    driver.submit(8, PROMPT[:20], max_tokens=10)
    driver.run()
    for choice in range(3):
        assert driver.choices[1, 5 + choice].tokens == completion(choice, 10)
        assert end_of(driver, 5 + choice) is FinishReason.MAX_TOKENS
    assert driver.choices[1, 8].tokens == completion(0, 10, PROMPT[:20])
    assert driver.engine.state().num_used_blocks == 0
    assert driver.engine.state().counters.num_finished == 4


@pytest.mark.parametrize("queue_policy", QueuePolicy)
def test_choices_enter_together_and_compute_the_full_blocks_of_their_prompt_once(queue_policy: QueuePolicy) -> None:
    driver = EngineDriver(policy=SchedulerPolicy(queue_policy=queue_policy))
    driver.submit(1, PROMPT, n=4, max_tokens=2)
    assert entered(driver) == [[(0, 0), (1, 32), (2, 32), (3, 32)]]
    assert [driver.choices[1, 1 + choice].num_cached_tokens for choice in range(4)] == [0, 32, 32, 32]
    assert driver.worker.num_computed_tokens == 40 + 3 * 8 + 4


@pytest.mark.parametrize("enable_mixed_steps", [False, True])
def test_no_choice_enters_before_the_first_choices_prompt_is_sent_whole(enable_mixed_steps: bool) -> None:
    policy = SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=18, enable_mixed_steps=enable_mixed_steps)
    driver = EngineDriver(policy=policy)
    driver.submit(1, PROMPT, n=3, max_tokens=12)
    # The last chunk leaves 14 tokens of the budget: enough for one partial block.
    assert entered(driver)[:3] == [[(0, 0)], [], [(1, 32), *([(2, 32)] if enable_mixed_steps else [])]]
    for choice in range(3):
        assert driver.choices[1, 1 + choice].tokens == completion(choice, 12)


def test_a_leading_choice_preempted_during_its_prompt_leads_again() -> None:
    policy = SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=4, enable_mixed_steps=True)
    driver = EngineDriver(num_blocks=5, policy=policy)
    driver.submit(9, PROMPT[:30], max_tokens=18)
    while not driver.choices:
        driver.step()
    # It takes the last three blocks for its whole prompt, and the neighbour soon needs one.
    driver.submit(1, PROMPT[::-1], n=2, max_tokens=5)
    choices = [choice for step in entered(driver) for choice, _ in step]
    assert (choices, driver.engine.state().counters.num_preemptions) == ([0, 0, 1], 1)
    for choice in range(2):
        assert driver.choices[1, 1 + choice].tokens == completion(choice, 5, PROMPT[::-1])


def test_each_choice_is_preempted_alone() -> None:
    driver = EngineDriver(num_blocks=6)
    driver.submit(1, PROMPT, n=3, max_tokens=40)
    driver.run()
    assert driver.engine.state().counters.num_preemptions > 0
    for choice in range(3):
        assert driver.choices[1, 1 + choice].tokens == completion(choice, 40)


def test_each_choice_must_fit_the_pool_alone() -> None:
    driver = EngineDriver(num_blocks=5)
    driver.submit(1, PROMPT, n=8, max_tokens=40)
    driver.submit(11, PROMPT, n=2, max_tokens=41)
    driver.run()
    assert {end_of(driver, 1 + choice) for choice in range(8)} == {FinishReason.MAX_TOKENS}
    assert [end_of(driver, handle) for handle in (11, 12)] == ["KV_CAPACITY_EXCEEDED"] * 2


@pytest.mark.parametrize("at", range(5))
def test_a_stop_string_in_one_choice_ends_only_that_choice(at: int) -> None:
    driver = EngineDriver(depth=2)
    driver.submit(1, PROMPT, n=3, max_tokens=10)
    for _ in range(at):
        driver.step()
    for handle in (1, 3):
        driver.stop_at(handle, 2)
        assert end_of(driver, handle) is FinishReason.STOP_STRING
    driver.run()
    assert driver.choices[1, 2].tokens == completion(1, 10)
    assert driver.engine.state().num_used_blocks == 0


@pytest.mark.parametrize("at", range(6))
def test_an_abort_by_the_requests_handle_ends_every_running_choice(at: int) -> None:
    stop = completion(0, 3)[-1]
    driver = EngineDriver(depth=2)
    driver.submit(1, PROMPT, n=3, max_tokens=10, stop_token_ids=(stop,))
    for _ in range(at):
        driver.step()
    ended = [handle for handle in (1, 2, 3) if end_of(driver, handle)]
    # The choice that has the request's handle may have ended already.
    assert (1 in ended) == (at >= 3)
    driver.abort(1)
    driver.run()
    assert [handle for handle in (1, 2, 3) if end_of(driver, handle)] == ended
    assert driver.engine.state().counters.num_finished == 3
    assert driver.engine.state().num_used_blocks == 0


def test_aborts_by_id_and_deadlines_end_every_choice_with_an_error() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=2))
    driver.on_event(ClientMessage(1, [submission(), submission(11, request_id="late", time_left_s=5.0)]))
    driver.step()
    driver.on_event(AbortRequest("r"))
    assert [end_of(driver, handle) for handle in (1, 2, 3)] == ["ABORTED_BY_CALL"] * 3
    driver.now = 5.0
    driver.on_event(TimePassed())
    assert [end_of(driver, handle) for handle in (11, 12, 13)] == ["DEADLINE_PASSED"] * 3
    driver.run()
    assert driver.engine.state().num_used_blocks == 0


def test_a_disconnected_client_loses_all_its_choices() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=2))
    driver.submit(1, PROMPT, n=5)
    driver.step()
    driver.on_event(ClientClosed(1))
    driver.run()
    state = driver.engine.state()
    assert (state.num_waiting, state.num_running, state.num_used_blocks) == (0, 0, 0)


@pytest.mark.parametrize("steps", range(6))
def test_a_lost_worker_pauses_every_choice(steps: int) -> None:
    driver = EngineDriver(depth=2, policy=SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=18))
    driver.submit(1, PROMPT, n=3, max_tokens=6)
    for _ in range(steps):
        driver.step()
    driver.on_event(DomainLost(0, 1))
    driver.on_event(attached(worker_facts(epoch=2)))
    driver.run()
    for choice in range(3):
        assert driver.choices[1, 1 + choice].tokens == completion(choice, 6)


@pytest.mark.parametrize("bad_choice", range(3))
def test_a_choice_with_non_finite_logits_fails_alone(bad_choice: int) -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=18))
    driver.submit(1, PROMPT, n=3, max_tokens=6)
    bad_slot = None
    while driver.sent:
        step = driver.sent.pop(0)
        for enter in step.batch.enters:
            bad_slot = enter.chunk.slot if enter.choice == bad_choice else bad_slot
        # Only in its first row.
        bad_rows = np.flatnonzero(step.batch.row_slots == bad_slot).astype(np.int32)
        bad_slot = None if bad_rows.size else bad_slot
        driver.return_result(replace(driver.worker.run(step), not_finite_rows=bad_rows))
    for choice in range(3):
        if choice == bad_choice:
            assert (driver.choices[1, 1 + choice].tokens, end_of(driver, 1 + choice)) == ([], "NUMERIC_ERROR")
        else:
            assert driver.choices[1, 1 + choice].tokens == completion(choice, 6)


def test_a_later_attempt_continues_the_unfinished_choices() -> None:
    driver = EngineDriver()
    so_far = (ChoiceSoFar(token_bytes(completion(0, 10)), has_ended=True), ChoiceSoFar(), ChoiceSoFar())
    resume(driver, submission(attempt=2, choices_so_far=so_far))
    driver.run()
    assert end_of(driver, 1) is None
    for choice in (1, 2):
        assert driver.choices[1, 1 + choice].tokens == completion(choice, 10)
        assert end_of(driver, 1 + choice) is FinishReason.MAX_TOKENS
    assert driver.engine.state().counters.num_finished == 2


def test_choices_continue_after_their_own_outputs_and_share_equal_prefixes() -> None:
    driver = EngineDriver()
    so_far = tuple(ChoiceSoFar(token_bytes(completion(choice, 3 * choice))) for choice in range(3))
    resume(driver, submission(attempt=2, choices_so_far=so_far))
    assert entered(driver) == [[(0, 0), (1, 32), (2, 32)]]
    for choice in range(3):
        assert driver.choices[1, 1 + choice].tokens == completion(choice, 10)


def test_choices_whose_output_is_complete_finish_at_once_and_the_others_continue() -> None:
    driver = EngineDriver()
    so_far = (ChoiceSoFar(token_bytes(completion(0, 10))), ChoiceSoFar(token_bytes(completion(1, 4))))
    resume(driver, submission(n=2, attempt=2, choices_so_far=so_far))
    assert [end_of(driver, handle) for handle in (1, 2)] == [FinishReason.MAX_TOKENS, None]
    driver.run()
    assert driver.choices[1, 2].tokens == completion(1, 10)


def test_a_resubmission_whose_choices_have_all_ended_gets_no_answer() -> None:
    driver = EngineDriver()
    resume(driver, submission(n=2, attempt=2, choices_so_far=(ChoiceSoFar(b"", has_ended=True),) * 2))
    assert [end_of(driver, handle) for handle in (1, 2)] == [None, None]
    assert (driver.sent, driver.engine.state().num_waiting) == ([], 0)


def test_a_later_attempt_replaces_every_choice_of_the_earlier_one() -> None:
    driver = EngineDriver(depth=2)
    driver.on_event(ClientMessage(1, [submission(1)]))
    for _ in range(4):
        driver.step()
    so_far = tuple(ChoiceSoFar(token_bytes(driver.choices[1, 1 + choice].tokens)) for choice in range(3))
    resume(driver, submission(21, attempt=2, choices_so_far=so_far))
    driver.run()
    for choice in range(3):
        # The earlier handles of the same client end with this error.
        assert end_of(driver, 1 + choice) == "ABORTED_BY_CALL"
        assert driver.choices[1, 21 + choice].tokens == completion(choice, 10)


def test_a_new_scheduler_checks_each_choice_once_it_has_a_worker() -> None:
    driver = EngineDriver(attach=False)
    so_far = (
        ChoiceSoFar(token_bytes(completion(0, 10))),
        ChoiceSoFar(token_bytes([100_000])),
        ChoiceSoFar(token_bytes(completion(2, 2))),
    )
    resume(driver, submission(attempt=2, choices_so_far=so_far))
    driver.on_event(attached(worker_facts()))
    driver.run()
    ends = [end_of(driver, handle) for handle in (1, 2, 3)]
    assert ends == [FinishReason.MAX_TOKENS, "INVALID_REQUEST", FinishReason.MAX_TOKENS]
    assert driver.choices[1, 3].tokens == completion(2, 10)


def test_a_refused_request_gets_an_end_for_each_choice() -> None:
    driver = EngineDriver()
    driver.submit(1, [], n=3)
    assert [end_of(driver, handle) for handle in (1, 2, 3)] == ["INVALID_REQUEST"] * 3


@pytest.mark.parametrize(("handle", "n"), [(1, 1), (3, 1), (0, 2), (2, 8)])
def test_a_handle_of_any_choice_cannot_be_reused(handle: int, n: int) -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, n=3)
    actions = driver.submit(handle, PROMPT, n=n, request_id="other")
    assert [action.client for action in actions if isinstance(action, CloseClient)] == [1]


def test_a_requests_handle_is_taken_while_any_of_its_choices_is_running() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, n=2)
    driver.stop_at(1, 1)
    actions = driver.submit(1, PROMPT, request_id="other")
    assert [type(action) for action in actions] == [CloseClient]


def test_each_choice_takes_a_queue_slot_and_the_prompt_counts_once() -> None:
    policy = SchedulerPolicy(max_num_seqs=1, max_waiting_requests=6, max_waiting_tokens=100)
    driver = EngineDriver(policy=policy)
    driver.submit(1, PROMPT, max_tokens=50)
    driver.submit(11, PROMPT, n=4)
    driver.submit(21, PROMPT, n=3)
    assert [end_of(driver, handle) for handle in (21, 22, 23)] == ["QUEUE_FULL"] * 3
    driver.submit(31, PROMPT)
    # 80 prompt tokens are waiting.
    driver.submit(41, PROMPT[:21])
    driver.submit(51, PROMPT[:20])
    assert [end_of(driver, handle) for handle in (31, 41, 51)] == [None, "QUEUE_FULL", None]


def test_a_request_with_more_choices_than_the_queue_bound_is_accepted_when_the_queue_is_empty() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, max_waiting_requests=2))
    driver.submit(1, PROMPT, n=5, max_tokens=2)
    driver.submit(11, PROMPT)
    assert end_of(driver, 11) == "QUEUE_FULL"
    driver.run()
    assert [driver.choices[1, 1 + choice].tokens for choice in range(5)] == [
        completion(choice, 2) for choice in range(5)
    ]


def test_a_request_with_one_choice_sends_no_extra_fields() -> None:
    driver = EngineDriver()
    [action] = driver.submit(1, PROMPT, max_tokens=2)
    assert isinstance(action, SendStep)
    [enter] = action.step.batch.enters
    assert (enter.choice, enter.stop_token_ids, enter.cached_token_bytes) == (0, (), b"")
