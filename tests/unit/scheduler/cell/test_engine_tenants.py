"""Requests of several tenants in one cell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.scheduler.cell.events import AbortRequest, ChoiceSoFar, ClientClosed, ClientMessage, Submission
from services.scheduler.core.batch.sequence import Finish, FinishReason, Priority
from services.scheduler.core.policy import CellTopology, SchedulerPolicy
from services.scheduler.core.queue.tenant_counters import OUTPUT_TOKEN_COST
from services.scheduler.core.queue.waiting_queue import QueuePolicy
from services.scheduler.core.results.outputs import RequestEnd
from shared.errors import ErrorCode, InvalidRequestError, ServiceError
from shared.ids import RequestHandle
from shared.request.sampling_params import SamplingParams
from shared.tenants.tenant import DEFAULT_TENANT, Tenant
from tests.support.scheduler.cell_model import PoisonedError, expected_completion
from tests.support.scheduler.engine_driver import ChoiceOutput, EngineDriver, token_bytes

A, B = Tenant("a"), Tenant("b")


def prompt(length: int, start: int = 11) -> list[int]:
    return [(start + 13 * index) % 1000 for index in range(length)]


def end_of(driver: EngineDriver, handle: int, client: int = 1) -> RequestEnd | None:
    choice = driver.choices.get((client, handle))
    return None if choice is None else choice.end


def reason_of(driver: EngineDriver, handle: int, client: int = 1) -> str | None:
    """The reason of an error; None if the choice has not ended, or has finished."""
    end = end_of(driver, handle, client)
    return None if end is None or end.error is None else end.error.reason


def finish_of(driver: EngineDriver, handle: int) -> Finish | None:
    end = end_of(driver, handle)
    return None if end is None else end.finish


def test_an_id_of_one_tenant_is_no_duplicate_of_anothers() -> None:
    driver = EngineDriver()
    for handle, tenant in enumerate((DEFAULT_TENANT, A, B), start=1):
        driver.submit(handle, prompt(20 + handle), request_id="same", max_tokens=4, tenant=tenant)
    driver.submit(9, prompt(3), request_id="same", tenant=A, client=2)
    assert reason_of(driver, 9, client=2) == "DUPLICATE_REQUEST"
    driver.run()
    for handle in (1, 2, 3):
        assert driver.choices[1, handle].tokens == expected_completion(prompt(20 + handle), 0, 4)


def test_an_abort_ends_the_request_of_its_own_tenant_only() -> None:
    driver = EngineDriver()
    driver.submit(1, prompt(20), request_id="same", max_tokens=4)
    driver.submit(2, prompt(30), request_id="same", max_tokens=4, tenant=A)
    driver.submit(3, prompt(40), request_id="same", max_tokens=4, tenant=B)
    driver.on_event(AbortRequest("same", "c"))
    assert [end_of(driver, handle) for handle in (1, 2, 3)] == [None, None, None]
    driver.on_event(AbortRequest("same", "a"))
    assert [reason_of(driver, handle) for handle in (1, 2, 3)] == [None, "ABORTED_BY_CALL", None]
    driver.on_event(AbortRequest("same"))
    assert [reason_of(driver, handle) for handle in (1, 2, 3)] == ["ABORTED_BY_CALL", "ABORTED_BY_CALL", None]
    driver.run()
    assert finish_of(driver, 3) == Finish(FinishReason.MAX_TOKENS)


def test_a_later_attempt_replaces_the_request_of_its_own_tenant_only() -> None:
    driver = EngineDriver()
    for handle, tenant in ((1, A), (2, B)):
        driver.submit(handle, prompt(20), request_id="same", max_tokens=4, tenant=tenant)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    again = Submission(RequestHandle(3), "same", token_bytes(prompt(20)), params, attempt=2, tenant=B)
    driver.on_event(ClientMessage(1, [again]))
    assert [reason_of(driver, handle) for handle in (1, 2)] == [None, "ABORTED_BY_CALL"]
    driver.run()
    assert driver.choices[1, 1].tokens == driver.choices[1, 3].tokens == expected_completion(prompt(20), 0, 4)


def test_a_poison_request_condemns_no_other_tenants_request_with_its_id() -> None:
    seed, innocent, poison = 7, prompt(20), prompt(30)
    driver = EngineDriver(poison={seed: len(poison) - 1})
    driver.submit(1, innocent, request_id="same", max_tokens=30, tenant=A)
    driver.submit(2, poison, request_id="same", max_tokens=30, tenant=B, seed=seed)
    while end_of(driver, 2) is None:
        try:
            driver.step()
        except PoisonedError:
            driver.lose()
            driver.attach()
    driver.run()
    assert reason_of(driver, 2) == "POISON_REQUEST"
    assert driver.choices[1, 1].tokens == expected_completion(innocent, 0, 30)


def error_of(driver: EngineDriver, handle: int, client: int = 1) -> ServiceError:
    end = end_of(driver, handle, client)
    assert end is not None
    assert end.error is not None
    return end.error


def test_choices_in_flight_are_limited_over_all_clients_ranks_and_states() -> None:
    driver = EngineDriver(topology=CellTopology(2), policy=SchedulerPolicy(max_num_seqs=1))
    few = Tenant("few", max_in_flight=4)
    driver.submit(1, prompt(20), tenant=few, client=1, n=3)
    driver.submit(1, prompt(30), tenant=few, client=2)
    state = driver.engine.state()
    assert (state.num_running, state.num_waiting) == (2, 2)
    driver.submit(1, prompt(10), tenant=few, client=3)
    refusal = error_of(driver, 1, client=3)
    assert (refusal.code, refusal.reason) == (ErrorCode.RESOURCE_EXHAUSTED, "TENANT_LIMIT")
    assert refusal.values == {"limit": "max_in_flight", "value": "4"}
    assert refusal.retry_delay_s is not None
    # No other tenant has the limit, and the newest key file counts.
    driver.submit(2, prompt(10), client=3, tenant=A)
    driver.submit(3, prompt(10), client=3)
    driver.submit(4, prompt(10), client=3, tenant=replace(few, max_in_flight=5))
    driver.submit(5, prompt(10), client=3, tenant=few)
    assert [reason_of(driver, handle, client=3) for handle in (2, 3, 4, 5)] == [None, None, None, "TENANT_LIMIT"]


@pytest.mark.parametrize("way", ["finish", "abort", "stop", "close"])
def test_a_choice_that_ends_makes_room(way: str) -> None:
    driver = EngineDriver()
    one = Tenant("one", max_in_flight=1)
    driver.submit(1, prompt(20), tenant=one, max_tokens=4)
    driver.submit(2, prompt(20), tenant=one)
    assert reason_of(driver, 2) == "TENANT_LIMIT"
    match way:
        case "finish":
            driver.run()
        case "abort":
            driver.abort(1)
        case "stop":
            driver.step()
            driver.on_event(ClientMessage(1, stop_ats=[(RequestHandle(1), 1)]))
        case "close":
            driver.on_event(ClientClosed(1))
    driver.submit(3, prompt(20), tenant=one, max_tokens=4)
    driver.run()
    assert driver.choices[1, 3].tokens == expected_completion(prompt(20), 0, 4)


def test_prompts_that_wait_are_limited_until_they_are_admitted() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, queue_policy=QueuePolicy.PRIORITY))
    short = Tenant("short", max_waiting_tokens=50)
    driver.submit(1, prompt(60), tenant=short, max_tokens=3)
    # It was above the limit by itself, and runs. Each choice waits; their prompt counts once.
    driver.submit(20, prompt(30), tenant=short, max_tokens=3, n=2, request_id="waits")
    driver.submit(3, prompt(21), tenant=short)
    refusal = error_of(driver, 3)
    assert (refusal.reason, refusal.values) == ("TENANT_LIMIT", {"limit": "max_waiting_tokens", "value": "50"})
    driver.submit(4, prompt(20), tenant=short, max_tokens=3)
    driver.submit(5, prompt(400), tenant=replace(short, name="other"), max_tokens=3)
    assert [reason_of(driver, handle) for handle in (4, 5)] == [None, None]
    driver.on_event(AbortRequest("waits", "short"))
    driver.submit(6, prompt(30, 500), tenant=short, max_tokens=3, priority=Priority.LOW)
    assert reason_of(driver, 6) is None
    # One that was preempted for a higher class waits again, and counts no more.
    driver.step()
    driver.submit(7, prompt(5), tenant=B, max_tokens=3, priority=Priority.HIGH)
    driver.run()
    assert driver.choices[1, 6].tokens == expected_completion(prompt(30, 500), 0, 3)


def test_choices_that_wait_are_limited_until_they_are_admitted() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1))
    few = Tenant("few", max_waiting_requests=3)
    driver.submit(1, prompt(20), tenant=few, max_tokens=3)
    # One runs; four wait, since none waited before.
    driver.submit(11, prompt(20), tenant=few, max_tokens=3, n=4, request_id="waits")
    driver.submit(2, prompt(20), tenant=few)
    refusal = error_of(driver, 2)
    assert (refusal.reason, refusal.values) == ("TENANT_LIMIT", {"limit": "max_waiting_requests", "value": "3"})
    driver.on_event(AbortRequest("waits", "few"))
    for handle in (3, 4, 5, 6):
        driver.submit(handle, prompt(20 + handle), tenant=few, max_tokens=3)
    assert [reason_of(driver, handle) for handle in (3, 4, 5, 6)] == [None, None, None, "TENANT_LIMIT"]
    driver.run()
    assert driver.choices[1, 5].tokens == expected_completion(prompt(25), 0, 3)


@pytest.mark.parametrize("limits", [SchedulerPolicy(max_waiting_requests=4), SchedulerPolicy(max_waiting_tokens=80)])
@pytest.mark.parametrize(("num_full_tenants", "expected"), [(8, [5, 4, 4, 4, 4]), (2, [5, 3, 1, 0, 0])])
def test_a_tenant_that_fills_its_part_of_the_queue_shuts_out_no_other(
    limits: SchedulerPolicy, num_full_tenants: int, expected: list[int]
) -> None:
    driver = EngineDriver(policy=replace(limits, max_num_seqs=1, num_full_tenants=num_full_tenants))
    loud = [Tenant(f"loud {number}") for number in range(5)]
    handle = 0
    num_accepted: list[int] = []
    for tenant in loud:
        handles = range(handle + 1, handle + 8)
        for handle in handles:
            driver.submit(handle, prompt(20), tenant=tenant, max_tokens=2)
        num_accepted.append([reason_of(driver, each) for each in handles].count(None))
    # The first one also has one that runs. Where the room of all is nearly full, each finds a part of the rest.
    assert num_accepted == expected
    assert {reason_of(driver, each) for each in range(1, handle + 1)} == {None, "QUEUE_FULL"}
    driver.run()
    assert all(end_of(driver, each) is not None for each in range(1, handle + 1))


def test_what_a_tenant_has_beyond_its_limits_takes_no_room_from_others() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, max_waiting_requests=2, num_full_tenants=2))
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    # What direct clients say that they continue is accepted without limits, on their word.
    continued = [
        Submission(
            RequestHandle(handle),
            f"r{handle}",
            token_bytes(prompt(20)),
            params,
            attempt=2,
            waits_as_new=True,
            tenant=A,
        )
        for handle in range(1, 40)
    ]
    driver.on_event(ClientMessage(1, continued))
    driver.submit(50, prompt(20), tenant=A)
    driver.submit(51, prompt(20), tenant=B, max_tokens=2)
    assert [reason_of(driver, handle) for handle in (50, 51)] == ["QUEUE_FULL", None]
    driver.run()
    assert driver.choices[1, 51].tokens == expected_completion(prompt(20), 0, 2)


def test_more_choices_than_may_ever_be_in_flight_are_an_invalid_request() -> None:
    driver = EngineDriver()
    two = Tenant("two", max_in_flight=2)
    driver.submit(1, prompt(20), tenant=two, n=3)
    error = error_of(driver, 1)
    assert isinstance(error, InvalidRequestError)
    assert [(one.field, one.reason) for one in error.violations] == [("sampling.n", "OUT_OF_RANGE")]
    driver.submit(11, prompt(20), tenant=two, n=2)
    assert reason_of(driver, 11) is None


def test_later_attempts_pass_a_tenants_limits() -> None:
    driver = EngineDriver()
    one = Tenant("one", max_in_flight=1, max_waiting_tokens=1)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    submissions = [
        Submission(RequestHandle(handle), f"r{handle}", token_bytes(prompt(20)), params, attempt=2, tenant=one)
        for handle in (1, 2)
    ]
    submissions.append(replace(submissions[0], handle=RequestHandle(10), request_id="many", n=2))
    driver.on_event(ClientMessage(1, submissions))
    driver.submit(3, prompt(20), tenant=one)
    assert reason_of(driver, 3) == "TENANT_LIMIT"
    driver.run()
    for handle in (1, 2, 10):
        assert driver.choices[1, handle].tokens == expected_completion(prompt(20), 0, 4)


@pytest.mark.parametrize(("waits_as_new", "order"), [(False, [1, 3, 4]), (True, [1, 4, 3])])
def test_a_client_gains_nothing_by_saying_that_it_continues_an_answer(waits_as_new: bool, order: list[int]) -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=2))
    driver.submit(2, prompt(20), tenant=B, max_tokens=30)
    driver.submit(1, prompt(60), tenant=A, max_tokens=2)
    # It waits from now on, so that B's counter, the lower one, is not lifted.
    driver.submit(4, prompt(30), tenant=B, max_tokens=4)
    driver.step()
    output = expected_completion(prompt(50, 500), 0, 4)[:2]
    driver.choices[1, 3] = ChoiceOutput(list(output), num_cached_tokens=0)
    continued = Submission(
        RequestHandle(3),
        "r3",
        token_bytes(prompt(50, 500)),
        SamplingParams(max_tokens=4, ignore_eos=True),
        attempt=2,
        waits_as_new=waits_as_new,
        choices_so_far=(ChoiceSoFar(token_bytes(output)),),
        tenant=A,
    )
    driver.on_event(ClientMessage(1, [continued]))
    ended: list[int] = []
    while len(ended) < 3:
        driver.step()
        ended += [handle for handle in order if handle not in ended and end_of(driver, handle) is not None]
    assert ended == order
    assert driver.choices[1, 3].tokens == expected_completion(prompt(50, 500), 0, 4)
    charged = driver.engine._cell.ranks[0].scheduler.queue.tenants[1].counter
    assert charged == 60 + (52 if waits_as_new else 0) + OUTPUT_TOKEN_COST * (2 + 2)


def test_a_lost_domain_changes_no_tenants_load() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1))
    two = Tenant("two", max_in_flight=2, max_waiting_tokens=20)
    driver.submit(1, prompt(20), tenant=two, max_tokens=4)
    driver.submit(2, prompt(20), tenant=two, max_tokens=4)
    driver.lose()
    driver.submit(3, prompt(1), tenant=two)
    assert error_of(driver, 3).values["limit"] == "max_in_flight"
    driver.submit(4, prompt(1), tenant=replace(two, max_in_flight=9))
    assert error_of(driver, 4).values["limit"] == "max_waiting_tokens"
    driver.attach()
    driver.run()
    driver.submit(5, prompt(400), tenant=two, max_tokens=4)
    assert reason_of(driver, 5) is None


def num_computed_by(driver: EngineDriver, handle: int, **request: Any) -> int:
    """How many tokens the worker computes for a request that runs alone."""
    num_before = driver.worker.num_computed_tokens
    driver.submit(handle, prompt(70), max_tokens=4, **request)
    driver.run()
    assert driver.choices[1, handle].tokens == expected_completion(prompt(70), 0, 4)
    return driver.worker.num_computed_tokens - num_before


@pytest.mark.parametrize("cache_salt", [b"", b"salt"])
def test_a_tenant_finds_no_prefix_of_anothers_requests(cache_salt: bytes) -> None:
    driver = EngineDriver()
    cold = num_computed_by(driver, 1, cache_salt=cache_salt)
    others = [num_computed_by(driver, handle, tenant=one, cache_salt=cache_salt) for handle, one in ((2, A), (3, B))]
    assert others == [cold, cold] == [73, 73]
    assert [driver.choices[1, handle].num_cached_tokens for handle in (1, 2, 3)] == [0, 0, 0]
    # Each has its own, with its own salts.
    for handle, tenant in ((11, DEFAULT_TENANT), (12, A), (13, B)):
        assert num_computed_by(driver, handle, tenant=tenant, cache_salt=cache_salt) == cold - 64
        assert num_computed_by(driver, handle + 10, tenant=tenant, cache_salt=b"other") == cold


def test_tenants_share_prefixes_if_the_cell_says_so() -> None:
    driver = EngineDriver(shares_between_tenants=True)
    assert num_computed_by(driver, 1, tenant=A, cache_salt=b"salt") == 73
    assert num_computed_by(driver, 2, tenant=B, cache_salt=b"salt") == 73 - 64
    assert num_computed_by(driver, 3, tenant=B) == 73
