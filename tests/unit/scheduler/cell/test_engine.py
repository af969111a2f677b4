"""The engine against a worker model: what clients receive, whatever the scheduler does."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.scheduler.cell.events import (
    ClientClosed,
    ClientMessage,
    CloseClient,
    Exit,
    SendStep,
)
from services.scheduler.core.batch.sequence import FinishReason
from services.scheduler.core.policy import SchedulerPolicy
from shared.ids import RequestHandle
from tests.support.pairwise import pairwise_rows
from tests.support.scheduler.cell_model import VOCABULARY, expected_completion
from tests.support.scheduler.engine_driver import EngineDriver, attached, worker_facts


def make_prompt(length: int, start: int = 11) -> list[int]:
    return [(start + 13 * index) % VOCABULARY for index in range(length)]


def finish_of(driver: EngineDriver, handle: int, client: int = 1) -> tuple[FinishReason, int]:
    end = driver.choices[client, handle].end
    assert end is not None
    assert end.finish is not None
    return end.finish.reason, end.num_completion_tokens


def error_of(driver: EngineDriver, handle: int, client: int = 1) -> str:
    end = driver.choices[client, handle].end
    assert end is not None
    assert end.error is not None
    return end.error.reason


def used_blocks(driver: EngineDriver) -> int:
    return driver.engine.state().num_used_blocks


def test_a_request_gets_its_tokens_and_its_finish() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(20), max_tokens=30)
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(make_prompt(20), 0, 30)
    assert finish_of(driver, 1) == (FinishReason.MAX_TOKENS, 30)
    assert used_blocks(driver) == 0


FACTORS: dict[str, tuple[Any, ...]] = {
    "block_size": (1, 16, 32),
    "enable_prefix_caching": (True, False),
    "depth": (1, 2, 3),
    "steps": ("whole prompts", "chunks", "mixed steps"),
}


@pytest.mark.parametrize("row", pairwise_rows(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_outputs_do_not_depend_on_neighbours_blocks_caching_preemption_overlap_or_chunks(row: dict[str, Any]) -> None:
    block_size, enable_prefix_caching, depth = row["block_size"], row["enable_prefix_caching"], row["depth"]
    budget, mixed = 600 if row["steps"] == "whole prompts" else 48, row["steps"] == "mixed steps"
    rng = random.Random(5)
    driver = EngineDriver(
        num_blocks=20 * 16 // block_size,
        block_size=block_size,
        depth=depth,
        enable_prefix_caching=enable_prefix_caching,
        policy=SchedulerPolicy(max_num_seqs=7, max_num_batched_tokens=budget, enable_mixed_steps=mixed),
    )
    requests = {}
    for handle in range(40):
        prompt = make_prompt(rng.choice([1, 15, 16, 17, 40, 64]), start=rng.choice([0, 1]))
        max_tokens = rng.randint(1, 120)
        requests[handle] = (prompt, handle % 3, max_tokens)
        driver.submit(handle, prompt, client=1 + handle % 2, seed=handle % 3, max_tokens=max_tokens)
        for _ in range(rng.randint(0, 3)):
            if driver.sent:
                driver.step()
    driver.run()
    for handle, (prompt, noise_seed, max_tokens) in requests.items():
        assert driver.choices[1 + handle % 2, handle].tokens == expected_completion(prompt, noise_seed, max_tokens)
    state = driver.engine.state()
    assert state.counters.num_preemptions > 0
    assert (state.num_used_blocks, state.num_running, state.num_waiting) == (0, 0, 0)
    assert (state.counters.num_prefix_hit_tokens > 0) is enable_prefix_caching


def test_a_client_gets_at_most_one_message_per_step() -> None:
    driver = EngineDriver()
    for handle in range(6):
        driver.submit(handle, make_prompt(10, handle), client=1 + handle % 2, max_tokens=5)
    num_steps = 0
    while driver.sent:
        driver.delivered.clear()
        driver.step()
        num_steps += 1
        clients = [deliver.client for deliver in driver.delivered]
        assert len(clients) == len(set(clients))
    assert num_steps > 5


def first_tokens(prompt: list[int], count: int) -> list[int]:
    return expected_completion(prompt, 0, count)


def test_requests_with_many_and_with_no_stop_tokens_share_a_batch() -> None:
    prompt = make_prompt(5)
    tokens = first_tokens(prompt, 6)
    others = [token_id for token_id in range(200, 263) if token_id not in tokens]
    driver = EngineDriver()
    driver.submit(1, prompt, max_tokens=6)
    driver.submit(2, prompt, max_tokens=6, stop_token_ids=(*others, tokens[3]))
    driver.run()
    assert finish_of(driver, 1) == (FinishReason.MAX_TOKENS, 6)
    assert finish_of(driver, 2) == (FinishReason.STOP_TOKEN, 4)


def test_a_stop_string_ends_the_request_at_once_and_frees_its_blocks_with_the_step() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(20), max_tokens=50)
    for _ in range(5):
        driver.step()
    assert len(driver.sent) == 1
    actions = driver.stop_at(1, 3)
    assert finish_of(driver, 1) == (FinishReason.STOP_STRING, 3)
    assert not any(isinstance(action, SendStep) for action in actions)
    assert used_blocks(driver) == 2
    driver.step()
    assert used_blocks(driver) == 0
    assert len(driver.choices[1, 1].tokens) == 5


def test_a_stop_string_for_a_finished_request_is_ignored() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(20), max_tokens=2)
    driver.run()
    driver.on_event(ClientMessage(1, stop_ats=[(RequestHandle(handle), 1) for handle in (1, 99)]))
    assert finish_of(driver, 1) == (FinishReason.MAX_TOKENS, 2)


def test_an_aborted_request_frees_its_blocks_with_its_step_and_does_not_affect_others() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(20), max_tokens=20)
    driver.submit(2, make_prompt(40, 300), max_tokens=20)
    for _ in range(4):
        driver.step()
    held = used_blocks(driver)
    driver.abort(2, 77)
    assert used_blocks(driver) == held
    driver.step()
    assert used_blocks(driver) == 2
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(make_prompt(20), 0, 20)
    assert driver.choices[1, 2].end is None


def test_an_aborted_waiting_request_is_removed() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1))
    driver.submit(1, make_prompt(20), max_tokens=3)
    driver.submit(2, make_prompt(20), max_tokens=3)
    driver.abort(2)
    assert driver.engine.state().num_waiting == 0
    driver.run()
    assert (1, 2) not in driver.choices


def test_a_disconnected_client_loses_only_its_own_requests() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(20), client=1, max_tokens=9)
    driver.submit(1, make_prompt(20, 5), client=2, max_tokens=9)
    driver.step()
    driver.on_event(ClientClosed(1))
    driver.run()
    assert driver.choices[2, 1].tokens == expected_completion(make_prompt(20, 5), 0, 9)
    assert used_blocks(driver) == 0
    driver.submit(1, make_prompt(3), client=3, request_id="1-1", max_tokens=1)
    driver.run()
    assert finish_of(driver, 1, client=3) == (FinishReason.MAX_TOKENS, 1)


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ([], {}, "INVALID_REQUEST"),
        ([1, VOCABULARY], {}, "INVALID_REQUEST"),
        ([1, -1], {}, "INVALID_REQUEST"),
        ([1], {"max_tokens": 0}, "INVALID_REQUEST"),
        ([1], {"temperature": float("nan")}, "INVALID_REQUEST"),
        ([1], {"top_p": 0.0}, "INVALID_REQUEST"),
        ([1], {"top_k": VOCABULARY + 1}, "INVALID_REQUEST"),
        ([1], {"stop_token_ids": (VOCABULARY,)}, "INVALID_REQUEST"),
        ([1], {"stop_token_sequences": ((),)}, "INVALID_REQUEST"),
        ([1] * 512, {}, "PROMPT_TOO_LONG"),
        ([1] * 500, {"max_tokens": 13}, "CONTEXT_EXCEEDED"),
        ([1] * 200, {"max_tokens": 57}, "KV_CAPACITY_EXCEEDED"),
    ],
)
def test_a_bad_request_is_refused_and_its_neighbour_continues(
    prompt: list[int], params: dict[str, Any], reason: str
) -> None:
    driver = EngineDriver(num_blocks=16)
    driver.submit(1, make_prompt(10), max_tokens=6)
    driver.submit(2, prompt, **params)
    assert error_of(driver, 2) == reason
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(make_prompt(10), 0, 6)


def test_a_request_that_fills_the_whole_pool_runs() -> None:
    driver = EngineDriver(num_blocks=16)
    driver.submit(1, make_prompt(200), max_tokens=56)
    driver.run()
    assert finish_of(driver, 1) == (FinishReason.MAX_TOKENS, 56)


def test_a_request_id_is_refused_while_it_is_in_flight() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(3), request_id="same", max_tokens=2)
    driver.submit(2, make_prompt(3), request_id="same", max_tokens=2, client=2)
    assert error_of(driver, 2, client=2) == "DUPLICATE_REQUEST"
    driver.run()
    driver.submit(3, make_prompt(3), request_id="same", max_tokens=2, client=2)
    driver.run()
    assert finish_of(driver, 3, client=2) == (FinishReason.MAX_TOKENS, 2)


def test_a_handle_used_twice_ends_the_stream() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(3))
    actions = driver.submit(1, make_prompt(3), request_id="other")
    assert [type(action) for action in actions] == [CloseClient]


def test_without_chunked_prefill_a_context_above_the_token_budget_is_refused_at_attach() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_batched_tokens=600, enable_chunked_prefill=False))
    actions = driver.on_event(attached(worker_facts(context_length=601, epoch=2)))
    assert [type(action) for action in actions] == [Exit]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("at", range(5))
def test_a_prompt_aborted_between_chunks_frees_its_blocks_and_keeps_them_cached(depth: int, at: int) -> None:
    driver = EngineDriver(depth=depth, policy=SchedulerPolicy(max_num_batched_tokens=32))
    driver.submit(1, make_prompt(150), max_tokens=5)
    for _ in range(at):
        driver.step()
    driver.abort(1)
    driver.run()
    assert used_blocks(driver) == 0
    driver.submit(2, make_prompt(150), max_tokens=5)
    driver.run()
    assert driver.choices[1, 2].tokens == expected_completion(make_prompt(150), 0, 5)
    num_cached = driver.choices[1, 2].num_cached_tokens
    assert num_cached is not None
    assert num_cached >= min(at, 4) * 32


def test_a_preempted_chunked_prompt_restarts_from_what_is_cached() -> None:
    driver = EngineDriver(
        num_blocks=16,
        depth=2,
        policy=SchedulerPolicy(max_num_batched_tokens=32, enable_mixed_steps=True),
    )
    driver.submit(1, make_prompt(26), max_tokens=60)
    for _ in range(2):
        driver.step()
    driver.submit(2, make_prompt(210, 300), max_tokens=4)
    driver.run()
    assert driver.engine.state().counters.num_preemptions > 0
    assert driver.choices[1, 1].tokens == expected_completion(make_prompt(26), 0, 60)
    assert driver.choices[1, 2].tokens == expected_completion(make_prompt(210, 300), 0, 4)
    assert driver.choices[1, 2].num_cached_tokens == 0
