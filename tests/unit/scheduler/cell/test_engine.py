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
from services.scheduler.core.batch.step import StepKind
from services.scheduler.core.policy import SchedulerPolicy
from shared.ids import RequestHandle
from tests.support.scheduler.cell_model import VOCABULARY, expected_completion
from tests.support.scheduler.engine_driver import EOS, EngineDriver, attached, worker_facts


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


def test_a_step_is_sent_before_the_previous_one_has_returned() -> None:
    driver = EngineDriver(depth=2)
    driver.submit(1, make_prompt(20), max_tokens=4)
    assert [step.batch.kind for step in driver.sent] == [StepKind.PREFILL, StepKind.DECODE]
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(make_prompt(20), 0, 4)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_request_of_known_length_gets_no_wasted_rows(depth: int) -> None:
    driver = EngineDriver(depth=depth)
    driver.submit(1, make_prompt(20), max_tokens=6)
    driver.submit(2, make_prompt(20, 300), max_tokens=9)
    driver.run()
    # Two separate prefills, then one row per token.
    assert driver.worker.num_computed_tokens == 20 + 20 + 5 + 8


@pytest.mark.parametrize("depth", [2, 3])
def test_a_row_after_a_stop_is_discarded(depth: int) -> None:
    prompt = make_prompt(20)
    tokens = first_tokens(prompt, 5)
    driver = EngineDriver(depth=depth)
    driver.submit(1, prompt, max_tokens=50, stop_token_ids=(tokens[4],))
    driver.run()
    assert driver.choices[1, 1].tokens == tokens
    assert driver.worker.num_computed_tokens == 20 + 4 + depth - 1
    assert used_blocks(driver) == 0


def test_a_row_sits_out_while_its_block_is_about_to_be_freed() -> None:
    driver = EngineDriver(num_blocks=5, depth=2, policy=SchedulerPolicy(max_num_batched_tokens=600))
    lengths = {1: (30, 20), 2: (3, 12), 3: (29, 2)}
    for handle, (prompt_length, max_tokens) in lengths.items():
        driver.submit(handle, make_prompt(prompt_length, handle), max_tokens=max_tokens)
    rows = []
    while driver.sent:
        if driver.sent[0].batch.skips_rows:
            rows.append(len(driver.sent[0].batch.row_slots))
        driver.step()
    # The third request was about to end: the row waited for its blocks, and no request was preempted.
    assert rows == [1]
    assert driver.engine.state().counters.num_preemptions == 0
    for handle, (prompt_length, max_tokens) in lengths.items():
        assert driver.choices[1, handle].tokens == expected_completion(
            make_prompt(prompt_length, handle), 0, max_tokens
        )


def test_a_parked_sequence_that_ends_with_a_result_in_flight_is_not_queued_again() -> None:
    prompt = make_prompt(16, 500)
    num_ended_parked = 0
    for count in range(1, 8):
        driver = EngineDriver(num_blocks=3, depth=2, policy=SchedulerPolicy(max_num_batched_tokens=600))
        driver.submit(1, make_prompt(14), max_tokens=20)
        driver.submit(2, prompt, max_tokens=20, stop_token_ids=(first_tokens(prompt, count)[-1],))
        num_entered = 0
        while driver.sent:
            num_entered += len(driver.sent[0].batch.enters)
            driver.step()
        assert finish_of(driver, 2) == (FinishReason.STOP_TOKEN, count)
        assert driver.choices[1, 1].tokens == expected_completion(make_prompt(14), 0, 20)
        num_preemptions = driver.engine.state().counters.num_preemptions
        num_ended_parked += num_preemptions - (num_entered - 2)
    # Whether its last token was in flight when it was preempted depends on the count.
    assert num_ended_parked > 0


@pytest.mark.parametrize("at", range(6))
def test_a_parked_sequence_can_be_aborted(at: int) -> None:
    driver = EngineDriver(num_blocks=4, depth=3, policy=SchedulerPolicy(max_num_batched_tokens=600))
    driver.submit(1, make_prompt(16), max_tokens=40)
    driver.submit(2, make_prompt(16, 500), max_tokens=40)
    while not driver.engine.state().counters.num_preemptions:
        driver.step()
    for _ in range(at):
        driver.step()
    driver.abort(2)
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(make_prompt(16), 0, 40)
    assert used_blocks(driver) == 0


def test_a_pure_decode_step_carries_only_newly_opened_blocks() -> None:
    driver = EngineDriver()
    for handle in range(4):
        driver.submit(handle, make_prompt(14 + handle, handle), max_tokens=4)
    while driver.sent[0].batch.kind is StepKind.PREFILL:
        driver.step()
    batch = driver.sent[0].batch
    assert (batch.enters, batch.leave_slots) == ([], [])
    # Only the prompts of 16 and 17 tokens are at a block boundary: 17 got its second block with the prefill.
    assert len(batch.append_slots) == 1


@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("budget", "mixed"), [(600, False), (48, False), (48, True)])
def test_outputs_do_not_depend_on_neighbours_blocks_caching_preemption_overlap_or_chunks(
    block_size: int, enable_prefix_caching: bool, depth: int, budget: int, mixed: bool
) -> None:
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


def test_a_preempted_request_reports_the_cached_tokens_of_its_first_prefill() -> None:
    driver = EngineDriver(num_blocks=4, policy=SchedulerPolicy(max_num_seqs=2, max_num_batched_tokens=600))
    driver.submit(1, make_prompt(16), max_tokens=40)
    driver.submit(2, make_prompt(16, 500), max_tokens=40)
    driver.run()
    assert driver.engine.state().counters.num_preemptions > 0
    assert driver.choices[1, 2].num_cached_tokens == 0


def test_a_choice_starts_with_the_time_it_waited() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=1, max_steps_in_flight=1))
    driver.submit(1, make_prompt(16), max_tokens=3)
    driver.submit(2, make_prompt(16, 500), max_tokens=1)
    driver.run()
    # A step takes a second, and the second choice enters when the first has left after three.
    assert (driver.choices[1, 1].queue_s, driver.choices[1, 2].queue_s) == (0.0, 3.0)


def test_a_second_equal_prompt_computes_only_what_is_not_cached() -> None:
    driver = EngineDriver()
    driver.submit(1, make_prompt(48), max_tokens=1)
    driver.run()
    before = driver.worker.num_computed_tokens
    driver.submit(2, make_prompt(48), max_tokens=1)
    driver.run()
    # The last block is full and cached, but one token must be computed.
    assert driver.worker.num_computed_tokens - before == 16
    assert driver.choices[1, 2].num_cached_tokens == 32


def first_tokens(prompt: list[int], count: int) -> list[int]:
    return expected_completion(prompt, 0, count)


def test_stops_are_checked_in_the_order_sequence_eos_stop_token_length() -> None:
    prompt = make_prompt(5)
    tokens = first_tokens(prompt, 3)
    driver = EngineDriver()
    driver.submit(1, prompt, max_tokens=3, stop_token_ids=(tokens[2],), stop_token_sequences=((tokens[1], tokens[2]),))
    driver.submit(2, prompt, max_tokens=3, stop_token_ids=(tokens[2],))
    driver.submit(3, prompt, max_tokens=3, stop_token_sequences=((tokens[0], tokens[2]),))
    driver.run()
    assert finish_of(driver, 1) == (FinishReason.STOP_SEQUENCE, 3)
    assert finish_of(driver, 2) == (FinishReason.STOP_TOKEN, 3)
    assert finish_of(driver, 3) == (FinishReason.MAX_TOKENS, 3)


def test_a_stop_sequence_does_not_match_prompt_tokens() -> None:
    prompt = make_prompt(5)
    driver = EngineDriver()
    driver.submit(1, prompt, max_tokens=4, stop_token_sequences=((prompt[-1], first_tokens(prompt, 1)[0]),))
    driver.run()
    assert finish_of(driver, 1) == (FinishReason.MAX_TOKENS, 4)


def prompt_that_draws_eos() -> tuple[list[int], int]:
    for start in range(10_000):
        prompt = make_prompt(3, start)
        tokens = first_tokens(prompt, 8)
        if EOS in tokens:
            return prompt, tokens.index(EOS) + 1
    raise AssertionError("no prompt draws EOS")


def test_eos_ends_a_request_unless_ignored() -> None:
    prompt, count = prompt_that_draws_eos()
    driver = EngineDriver()
    driver.submit(1, prompt, ignore_eos=False, stop_token_ids=(EOS,))
    driver.submit(2, prompt)
    driver.submit(3, prompt, stop_token_ids=(EOS,))
    driver.run()
    assert finish_of(driver, 1) == (FinishReason.EOS, count)
    assert driver.choices[1, 1].tokens[-1] == EOS
    assert finish_of(driver, 2) == (FinishReason.MAX_TOKENS, 8)
    assert finish_of(driver, 3) == (FinishReason.STOP_TOKEN, count)


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


def test_the_delay_gate_holds_a_prefill_until_the_oldest_request_has_waited_long_enough() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(delay_factor=2.5))
    driver.submit(1, make_prompt(5), max_tokens=20)
    driver.step()
    driver.submit(2, make_prompt(5, 40), max_tokens=20)
    kinds = []
    for _ in range(4):
        driver.step()
        kinds.append(driver.sent[0].batch.kind)
    # The last prefill took one second, so the second request waits until more than 2.5 seconds have passed.
    assert kinds == [StepKind.DECODE, StepKind.DECODE, StepKind.PREFILL, StepKind.DECODE]


def test_prefills_come_first_and_respect_the_token_budget_and_max_num_seqs() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_seqs=3, max_num_batched_tokens=512))
    driver.submit(1, make_prompt(5), max_tokens=20)
    for handle, length in ((2, 300), (3, 212), (4, 1)):
        driver.submit(handle, make_prompt(length, handle), max_tokens=20)
    driver.step()
    assert [len(entering.chunk.token_bytes) // 4 for entering in driver.sent[0].batch.enters] == [300, 212]
    driver.step()
    assert driver.sent[0].batch.kind is StepKind.DECODE
    assert driver.engine.state().num_waiting == 1


def chunk_lengths(driver: EngineDriver) -> list[int]:
    """The prompt tokens of each chunk in the oldest step in flight."""
    batch = driver.sent[0].batch
    chunks = [*batch.chunks, *(entering.chunk for entering in batch.enters)]
    return [len(chunk.token_bytes) // 4 for chunk in chunks]


def test_a_prompt_beyond_the_budget_is_computed_in_chunks_and_the_last_one_yields_a_token() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_batched_tokens=64))
    driver.submit(1, make_prompt(150), max_tokens=3)
    driver.submit(2, make_prompt(10, 300), max_tokens=3)
    steps = []
    while driver.sent:
        steps.append((driver.sent[0].batch.kind, chunk_lengths(driver), len(driver.sent[0].batch.row_slots)))
        driver.step()
    prefill, decode = StepKind.PREFILL, StepKind.DECODE
    # The next prompt uses the rest of the last chunk's budget; nothing is decoded in between.
    assert steps == [
        (prefill, [64], 0),
        (prefill, [64], 0),
        (prefill, [22, 10], 2),
        (decode, [], 2),
        (decode, [], 2),
    ]
    assert driver.choices[1, 1].tokens == expected_completion(make_prompt(150), 0, 3)


def test_a_prompt_that_fits_in_one_step_is_not_split() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_batched_tokens=64))
    driver.submit(1, make_prompt(3), max_tokens=1)
    driver.submit(2, make_prompt(40, 300), max_tokens=1)
    driver.submit(3, make_prompt(40, 600), max_tokens=1)
    lengths = []
    while driver.sent:
        lengths.append(chunk_lengths(driver))
        driver.step()
    assert lengths == [[3], [40], [40]]


def test_a_chunked_prompt_holds_all_its_blocks_from_the_first_chunk_on() -> None:
    driver = EngineDriver(num_blocks=16, policy=SchedulerPolicy(max_num_batched_tokens=32))
    driver.submit(1, make_prompt(200), max_tokens=2)
    assert used_blocks(driver) == 13
    driver.submit(2, make_prompt(100, 300), max_tokens=2)
    driver.run()
    assert driver.choices[1, 2].tokens == expected_completion(make_prompt(100, 300), 0, 2)


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


def test_decodes_join_a_prefill_in_mixed_steps_within_the_budget() -> None:
    driver = EngineDriver(policy=SchedulerPolicy(max_num_batched_tokens=32, enable_mixed_steps=True))
    driver.submit(1, make_prompt(5), max_tokens=20)
    driver.step()
    driver.submit(2, make_prompt(70, 300), max_tokens=3)
    driver.step()
    kinds = []
    while driver.sent:
        batch = driver.sent[0].batch
        kinds.append(batch.kind)
        assert sum(chunk_lengths(driver)) + len(batch.decode_slots) <= 32
        driver.step()
    assert kinds[:4] == [StepKind.MIXED] * 3 + [StepKind.DECODE]
    assert driver.choices[1, 2].tokens == expected_completion(make_prompt(70, 300), 0, 3)


def test_preempted_requests_wait_ahead_of_new_ones() -> None:
    driver = EngineDriver(num_blocks=4, policy=SchedulerPolicy(max_num_batched_tokens=600))
    driver.submit(1, make_prompt(16), max_tokens=40)
    driver.submit(2, make_prompt(16, 500), max_tokens=40)
    driver.submit(3, make_prompt(48, 700), max_tokens=10)
    ends = []
    while driver.sent:
        driver.step()
        ends += [handle for (_, handle), output in driver.choices.items() if output.end and handle not in ends]
    assert ends == [1, 2, 3]
    assert driver.engine.state().counters.num_preemptions > 0
