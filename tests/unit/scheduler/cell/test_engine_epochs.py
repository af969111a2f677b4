"""What happens to requests when a worker is lost, hangs or answers late, and when a replica resubmits them."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.cell.engine import Engine
from services.scheduler.cell.events import (
    Beat,
    ChoiceSoFar,
    ClientMessage,
    Deliver,
    DomainLost,
    DropDomain,
    Exit,
    RankHeartbeat,
    StepReturned,
    Submission,
    TimePassed,
)
from services.scheduler.core.batch.sequence import FinishReason
from services.scheduler.core.policy import CacheSettings, SchedulerPolicy
from services.scheduler.core.results.outputs import RequestEnd
from services.scheduler.core.step_deadline import FIRST_STEP_S, MIN_STEP_S
from services.scheduler.core.worker_facts import WorkerFacts
from shared.ids import DpRank, RequestHandle
from shared.network.heartbeat import HEARTBEAT_S, LEASE_S
from shared.request.sampling_params import SamplingParams
from shared.step.step import StepResult
from tests.support.scheduler.cell_model import expected_completion
from tests.support.scheduler.engine_driver import EOS, EngineDriver, attached, token_bytes, worker_facts

PROMPT = list(range(100, 120))


def attempt(number: int, handle: int, output: list[int], *, request_id: str = "r", **changes: object) -> Submission:
    """An attempt of a request, with the output that its client already has."""
    fields = {"params": SamplingParams(max_tokens=12, ignore_eos=True), **changes}
    so_far = (ChoiceSoFar(token_bytes(output)),) if output else ()
    return Submission(
        RequestHandle(handle),
        request_id,
        token_bytes(PROMPT),
        attempt=number,
        choices_so_far=so_far,
        **fields,  # type: ignore[arg-type]
    )


def end_of(driver: EngineDriver, handle: int, client: int = 1) -> RequestEnd:
    end = driver.choices[client, handle].end
    assert end is not None
    return end


def reason_of(driver: EngineDriver, handle: int, client: int = 1) -> str:
    error = end_of(driver, handle, client).error
    assert error is not None
    return error.reason


def finish_of(driver: EngineDriver, handle: int) -> tuple[FinishReason, int]:
    end = end_of(driver, handle)
    assert end.finish is not None
    return end.finish.reason, end.num_completion_tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_lost_worker_pauses_its_requests(depth: int) -> None:
    driver = EngineDriver(depth=depth)
    driver.submit(1, PROMPT, max_tokens=12, client=1)
    driver.submit(1, PROMPT[:7], max_tokens=12, client=2)
    for _ in range(4):
        driver.step()
    known = list(driver.choices[1, 1].tokens)
    actions = driver.on_event(DomainLost(0, 1))
    # A replica that finds a stop string ends the choice itself: it must know of the resume by then.
    assert [(action.client, action.outputs.resumes) for action in actions if isinstance(action, Deliver)] == [
        (1, [(1, 1)]),
        (2, [(1, 1)]),
    ]
    assert len(actions) == 2
    state = driver.engine.state()
    assert (state.ready, state.num_waiting, state.num_running, state.num_blocks) == (False, 2, 0, 0)
    driver.on_event(attached(worker_facts(epoch=2)))
    driver.run()
    assert driver.choices[1, 1].tokens[: len(known)] == known
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 12)
    assert driver.choices[2, 1].tokens == expected_completion(PROMPT[:7], 0, 12)
    assert driver.engine.state().counters.num_lost_epochs == 1


def test_requests_wait_while_the_worker_is_away_but_not_before_the_first_worker() -> None:
    engine = Engine(SchedulerPolicy(), CacheSettings())
    *_, refused = engine.on_event(ClientMessage(1, [attempt(1, 1, [])]), 0.0)
    assert isinstance(refused, Deliver)
    assert refused.outputs.ends[0].error is not None
    assert refused.outputs.ends[0].error.reason == "NOT_READY"
    driver = EngineDriver()
    driver.on_event(DomainLost(0, 1))
    driver.submit(1, PROMPT, max_tokens=3)
    assert driver.choices == {}
    driver.on_event(attached(worker_facts(epoch=2)))
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 3)


def test_late_and_repeated_results_are_dropped() -> None:
    driver = EngineDriver(depth=2)
    driver.submit(1, PROMPT, max_tokens=6)
    repeated = driver.step()
    assert driver.return_result(repeated) == []
    late = driver.worker.run(driver.sent.pop(0))
    driver.on_event(DomainLost(0, 1))
    driver.on_event(attached(worker_facts(epoch=2)))
    assert driver.return_result(late) == []
    assert driver.engine.state().counters.num_late_results == 2
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 6)


def test_a_late_result_with_non_finite_rows_affects_no_request() -> None:
    driver = EngineDriver(depth=2)
    driver.submit(1, PROMPT, max_tokens=6)
    late = driver.worker.run(driver.sent.pop(0))
    driver.on_event(DomainLost(0, 1))
    driver.on_event(attached(worker_facts(epoch=2)))
    driver.return_result(StepResult(1, late.step_id, late.token_ids, np.array([0], np.int32)))
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 6)


def test_a_result_that_skips_a_step_ends_the_epoch() -> None:
    driver = EngineDriver(depth=2)
    driver.submit(1, PROMPT, max_tokens=6)
    driver.worker.run(driver.sent.pop(0))
    skipping = driver.worker.run(driver.sent.pop(0))
    drop, *_ = driver.return_result(skipping)
    assert isinstance(drop, DropDomain)
    assert driver.engine.state().num_waiting == 1


def pass_time(driver: EngineDriver, duration_s: float) -> list[DropDomain]:
    """Advance the clock; returns the domains dropped meanwhile."""
    num_before = len(driver.actions)
    driver.now += duration_s
    driver.on_event(TimePassed())
    return [action for action in driver.actions[num_before:] if isinstance(action, DropDomain)]


def test_the_first_step_of_each_kind_may_compile() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, max_tokens=20)
    assert pass_time(driver, FIRST_STEP_S - 2.0) == []
    driver.step()
    # The first decode after the prefill is the first of its kind, too.
    assert pass_time(driver, FIRST_STEP_S - 0.1) == []
    assert len(pass_time(driver, 0.1 + HEARTBEAT_S)) == 1


def test_a_step_that_takes_too_long_ends_the_epoch() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, max_tokens=20)
    driver.step()
    # It takes a second.
    driver.step()
    late = driver.worker.run(driver.sent.pop(0))
    assert pass_time(driver, MIN_STEP_S - 0.1) == []
    [drop] = pass_time(driver, 0.1 + HEARTBEAT_S)
    assert drop == DropDomain(0, 1, "rank 0 neither answers a step nor makes progress")
    assert driver.return_result(late) == []
    driver.attach()
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 20)


def test_a_worker_that_is_known_to_be_slow_gets_more_time() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, max_tokens=20)
    driver.step()
    driver.now += 6.0
    driver.step()
    # It took 7 s for one token, so 70 s are not a hang.
    assert pass_time(driver, 69.9) == []
    assert len(pass_time(driver, 0.1 + HEARTBEAT_S)) == 1


def test_a_step_is_not_a_hang_while_its_worker_makes_progress() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, max_tokens=20)
    driver.step()
    driver.step()
    for progress in range(1, 30):
        driver.progress[0] = progress
        assert pass_time(driver, MIN_STEP_S - 1.0) == []
    assert len(pass_time(driver, MIN_STEP_S)) == 1


@pytest.mark.parametrize("has_work", [True, False])
def test_a_silent_worker_is_lost_with_or_without_a_step(has_work: bool) -> None:
    policy = SchedulerPolicy(worker_silence_s=3.0)
    driver = EngineDriver(policy=policy)
    if has_work:
        driver.submit(1, PROMPT, max_tokens=20)
    driver.silent_ranks = {0}
    assert pass_time(driver, policy.worker_silence_s) == []
    assert pass_time(driver, 2 * HEARTBEAT_S) == [DropDomain(0, 1, "rank 0 is silent")]
    driver.attach()
    driver.silent_ranks = set()
    driver.run()
    assert ((1, 1) in driver.choices) == has_work


def test_a_deadline_that_passes_at_the_moment_a_worker_is_lost_takes_effect_first() -> None:
    driver = EngineDriver()
    given_up_at = 3.0 + HEARTBEAT_S
    driver.on_event(ClientMessage(1, [attempt(1, 1, [], time_left_s=given_up_at)]))
    driver.silent_ranks = {0}
    assert pass_time(driver, given_up_at) == [DropDomain(0, 1, "rank 0 is silent")]
    assert (reason_of(driver, 1), end_of(driver, 1).num_resumes) == ("DEADLINE_PASSED", 0)
    assert not driver.engine.state().num_suspects


def test_heartbeats_of_an_ended_epoch_are_ignored() -> None:
    driver = EngineDriver()
    driver.attach()
    driver.silent_ranks = {0}
    for _ in range(round(3.0 / HEARTBEAT_S)):
        driver.now += HEARTBEAT_S
        driver.on_event(RankHeartbeat(DpRank(0), 1, 7))
    assert len(pass_time(driver, 2 * HEARTBEAT_S)) == 1


def test_the_engine_sends_heartbeats_with_the_number_of_steps_sent() -> None:
    driver = EngineDriver(depth=2)
    driver.submit(1, PROMPT, max_tokens=20)
    num_beats = driver.num_beats
    pass_time(driver, 10 * HEARTBEAT_S)
    assert driver.num_beats == num_beats + 10
    driver.now += HEARTBEAT_S
    assert driver.engine.on_event(TimePassed(), driver.now)[0] == Beat(2)


def test_an_engine_that_was_stopped_for_longer_than_its_lease_exits_and_does_nothing_else() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, max_tokens=20)
    result = driver.worker.run(driver.sent.pop(0))
    now = driver.now + LEASE_S + HEARTBEAT_S + 0.1
    for event in (StepReturned(DpRank(0), result), TimePassed(), ClientMessage(1, [attempt(1, 5, [])])):
        [action] = driver.engine.on_event(event, now)
        assert isinstance(action, Exit)


def test_an_engine_without_a_lease_does_not_exit() -> None:
    driver = EngineDriver(attach=False)
    driver.engine.on_event(TimePassed(), 0.0)
    assert driver.engine.on_event(TimePassed(), 100.0) == [Beat(0)]


def test_a_paused_engine_does_not_count_its_own_pause_as_worker_silence() -> None:
    driver = EngineDriver()
    driver.submit(1, PROMPT, max_tokens=20)
    driver.step()
    driver.step()
    # The engine is not called for nine seconds. Then the worker's heartbeats arrive, after the timer.
    driver.now += 9.0
    assert all(not isinstance(action, DropDomain) for action in driver.engine.on_event(TimePassed(), driver.now))
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 20)


def test_a_worker_that_returns_with_another_model_is_dropped() -> None:
    driver = EngineDriver()
    driver.on_event(DomainLost(0, 1))
    drop, *_ = driver.on_event(attached(WorkerFacts(2, "other", 512, 1000, (EOS,), 64)))
    assert isinstance(drop, DropDomain)
    assert not driver.engine.is_ready


def test_a_smaller_pool_ends_requests_that_can_no_longer_fit() -> None:
    driver = EngineDriver()
    driver.submit(1, list(range(100)), max_tokens=50)
    driver.submit(2, PROMPT, max_tokens=4)
    driver.step()
    driver.on_event(DomainLost(0, 1))
    driver.on_event(attached(worker_facts(epoch=2, num_blocks=8)))
    assert reason_of(driver, 1) == "KV_CAPACITY_EXCEEDED"
    driver.run()
    assert driver.choices[1, 2].tokens == expected_completion(PROMPT, 0, 4)


def test_a_request_that_ended_while_its_step_was_in_flight_is_not_queued_again() -> None:
    driver = EngineDriver(depth=2)
    driver.submit(1, PROMPT, max_tokens=6)
    driver.step()
    driver.abort(1)
    driver.on_event(DomainLost(0, 1))
    assert driver.engine.state().num_waiting == 0


def test_a_later_attempt_continues_after_its_output() -> None:
    expected = expected_completion(PROMPT, 0, 12)
    driver = EngineDriver()
    driver.resume(1, attempt(2, 1, expected[:5]), expected[:5])
    driver.run()
    assert driver.choices[1, 1].tokens == expected
    assert finish_of(driver, 1) == (FinishReason.MAX_TOKENS, 12)


def test_a_later_attempt_replaces_an_earlier_one() -> None:
    expected = expected_completion(PROMPT, 0, 12)
    driver = EngineDriver()
    driver.on_event(ClientMessage(1, [attempt(1, 1, [])]))
    driver.step()
    driver.step()
    num_tokens = len(driver.choices[1, 1].tokens)
    driver.resume(2, attempt(2, 7, expected[:1]), expected[:1])
    driver.run()
    assert driver.choices[2, 7].tokens == expected
    # The client of the earlier attempt learns that it gets no more.
    assert (reason_of(driver, 1), len(driver.choices[1, 1].tokens)) == ("DUPLICATE_REQUEST", num_tokens)
    assert driver.engine.state().num_used_blocks == 0


def test_a_refused_later_attempt_leaves_the_earlier_one_alone() -> None:
    expected = expected_completion(PROMPT, 0, 12)
    driver = EngineDriver()
    driver.on_event(ClientMessage(1, [attempt(1, 1, [])]))
    driver.step()
    driver.on_event(ClientMessage(2, [attempt(2, 7, [5000])]))
    assert reason_of(driver, 7, client=2) == "INVALID_REQUEST"
    driver.run()
    assert driver.choices[1, 1].tokens == expected


@pytest.mark.parametrize("number", [1, 2])
def test_an_attempt_that_is_not_later_is_refused(number: int) -> None:
    driver = EngineDriver()
    driver.on_event(ClientMessage(1, [attempt(2, 1, [])]))
    driver.on_event(ClientMessage(2, [attempt(number, 1, [])]))
    assert reason_of(driver, 1, client=2) == "DUPLICATE_REQUEST"
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 12)


def test_a_new_scheduler_accepts_resubmissions_before_it_has_a_worker() -> None:
    expected = expected_completion(PROMPT, 0, 12)
    driver = EngineDriver(attach=False)
    driver.resume(1, attempt(2, 1, expected[:3]), expected[:3])
    driver.resume(1, attempt(2, 2, expected, request_id="complete"), expected)
    driver.on_event(ClientMessage(1, [attempt(2, 3, [5000], request_id="nonsense")]))
    driver.on_event(attached(worker_facts()))
    driver.run()
    assert driver.choices[1, 1].tokens == expected
    assert finish_of(driver, 2) == (FinishReason.MAX_TOKENS, 12)
    assert reason_of(driver, 3) == "INVALID_REQUEST"


def test_an_output_that_ends_the_request_is_answered_at_once() -> None:
    driver = EngineDriver()
    driver.resume(1, attempt(2, 1, [5, EOS], params=SamplingParams(max_tokens=12)), [5, EOS])
    assert finish_of(driver, 1) == (FinishReason.EOS, 2)
    assert driver.engine.state().num_waiting == 0


def test_later_attempts_are_ordered_by_age_and_skip_the_queue_bound() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, max_waiting_requests=1))
    driver.now = 100.0
    for handle in (1, 2, 3):
        driver.submit(handle, PROMPT, max_tokens=5)
    assert reason_of(driver, 3) == "QUEUE_FULL"
    driver.on_event(ClientMessage(1, [attempt(2, 4, [], age_s=50.0)]))
    order: list[int] = []
    while driver.sent:
        driver.step()
        order += [handle for (_, handle), output in driver.choices.items() if output.tokens and handle not in order]
    assert order == [1, 4, 2]


def test_the_output_cannot_be_longer_than_max_tokens() -> None:
    driver = EngineDriver()
    driver.on_event(ClientMessage(1, [attempt(2, 1, [1] * 13)]))
    assert reason_of(driver, 1) == "INVALID_REQUEST"


def test_nothing_is_computed_for_a_request_after_its_deadline() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1))
    driver.on_event(ClientMessage(1, [attempt(1, 1, [], time_left_s=2.5)]))
    driver.on_event(ClientMessage(1, [attempt(1, 2, [], request_id="waits", time_left_s=1.5)]))
    driver.submit(3, PROMPT, max_tokens=3)
    driver.now = 1.0
    driver.on_event(TimePassed())
    assert driver.engine.next_wakeup() == 1.5
    driver.step()
    assert reason_of(driver, 2) == "DEADLINE_PASSED"
    driver.now = 2.5
    driver.on_event(TimePassed())
    assert reason_of(driver, 1) == "DEADLINE_PASSED"
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 1)
    driver.run()
    assert driver.choices[1, 3].tokens == expected_completion(PROMPT, 0, 3)
    assert driver.engine.state().num_used_blocks == 0


def test_a_deadline_that_has_passed_on_arrival_is_answered_at_once() -> None:
    driver = EngineDriver()
    driver.on_event(ClientMessage(1, [attempt(1, 1, [], time_left_s=0.0)]))
    assert reason_of(driver, 1) == "DEADLINE_PASSED"
    assert driver.sent == []
