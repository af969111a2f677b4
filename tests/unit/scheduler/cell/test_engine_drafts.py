"""A worker that drafts: steps return several tokens per row, and clients receive the same as without drafts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from services.scheduler.cell.events import Deliver, DropDomain
from services.scheduler.core.batch.sequence import FinishReason
from services.scheduler.core.policy import SchedulerPolicy
from services.scheduler.core.results.outputs import RequestEnd
from shared.request.limits import MAX_DRAFT_TOKENS
from shared.request.sampling_params import SamplingOptions
from tests.support.scheduler.cell_model import VOCABULARY, FallibleOracle, HashGrammar, expected_completion
from tests.support.scheduler.engine_driver import EngineDriver, attached, worker_facts

PROMPT = list(range(100, 120))


def end_of(driver: EngineDriver, handle: int) -> RequestEnd:
    end = driver.choices[1, handle].end
    assert end is not None
    return end


def reason_of(driver: EngineDriver, handle: int) -> FinishReason:
    finish = end_of(driver, handle).finish
    assert finish is not None
    return finish.reason


def counts_of_last(driver: EngineDriver) -> list[int] | None:
    counts = driver.delivered[-1].outputs.counts
    return None if counts is None else counts.tolist()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 8])
def test_accepted_drafts_save_steps_and_change_no_token(depth: int, num_draft_tokens: int) -> None:
    driver = EngineDriver(depth=depth, num_draft_tokens=num_draft_tokens)
    driver.submit(1, PROMPT, max_tokens=41)
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 41)
    assert (reason_of(driver, 1), end_of(driver, 1).num_completion_tokens) == (FinishReason.MAX_TOKENS, 41)
    # The prefill returns the first token. With steps in flight, some turn out to be wasted.
    num_needed = -(-40 // (num_draft_tokens + 1))
    num_steps = driver.engine.state().ranks[0].num_steps.decode
    assert num_steps == num_needed if depth == 1 else num_needed <= num_steps < num_needed + depth


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("block_size", [1, 16])
def test_rejected_drafts_change_no_token_even_when_blocks_run_out(depth: int, block_size: int) -> None:
    driver = EngineDriver(
        num_blocks=160 // block_size,
        block_size=block_size,
        depth=depth,
        num_draft_tokens=8,
        policy=SchedulerPolicy(max_num_seqs=6),
        oracle=FallibleOracle(Random(depth), share_right=0.6),
    )
    for handle in range(8):
        driver.submit(handle, PROMPT[handle:], seed=handle, max_tokens=40)
    driver.run()
    assert driver.engine.state().counters.num_preemptions > 0
    for handle in range(8):
        assert driver.choices[1, handle].tokens == expected_completion(PROMPT[handle:], handle, 40)


@pytest.mark.parametrize("num_draft_tokens", [0, 3, 8])
@pytest.mark.parametrize("fails_after", [0, 1, 5, 7])
def test_a_failed_grammar_keeps_the_tokens_before_the_failure(num_draft_tokens: int, fails_after: int) -> None:
    driver = EngineDriver(num_draft_tokens=num_draft_tokens)
    options = SamplingOptions(grammar=str(fails_after), num_logprobs=1)
    completion = expected_completion(PROMPT, 0, 20, grammar=HashGrammar(options.grammar))
    driver.oracle.learn_answer(PROMPT, completion)
    driver.submit(1, PROMPT, max_tokens=20, options=options, ignore_eos=True)
    driver.run()
    error = end_of(driver, 1).error
    assert error is not None
    assert error.reason == "INVALID_REQUEST"
    assert driver.choices[1, 1].tokens == completion[:fails_after]
    assert len(driver.choices[1, 1].scores) == fails_after


def test_a_row_sent_before_its_request_ended_returns_no_tokens() -> None:
    driver = EngineDriver(depth=3, num_draft_tokens=8)
    driver.submit(1, PROMPT, max_tokens=12)
    # The prefill's token, nine, two, and one row that could not yet be known to be wasted.
    counts = []
    while driver.sent:
        result = driver.step()
        counts.append(1 if result.counts is None else int(result.counts[0]))
    assert counts == [1, 9, 2, 0]
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT, 0, 12)


def test_drafts_and_accepted_drafts_are_counted() -> None:
    driver = EngineDriver(num_draft_tokens=4)
    completion = expected_completion(PROMPT, 0, 11)
    driver.submit(1, PROMPT, max_tokens=11)
    # The second of the first four is wrong.
    driver.oracle.learn_answer([*PROMPT, *completion[:2]], [completion[2] + 1])
    driver.run()
    counters = driver.engine.state().counters
    assert driver.choices[1, 1].tokens == completion
    assert (counters.num_draft_tokens, counters.num_accepted_tokens) == (2 + 4 + 2, 1 + 4 + 2)


def test_kv_of_wrong_drafts_is_never_shared() -> None:
    driver = EngineDriver(depth=3, num_draft_tokens=8)
    completion = expected_completion(PROMPT, 0, 40)
    # Wasted rows are in flight when it stops, and write after its last token.
    driver.submit(1, PROMPT, max_tokens=40, stop_token_ids=(completion[12],))
    driver.run()
    known = [*PROMPT, *completion[:13]]
    driver.submit(2, [*known, 1, 2, 3], seed=9)
    driver.run()
    # The cell of its last token was never computed as a known token.
    assert driver.choices[1, 2].num_cached_tokens == (len(known) - 1) // 16 * 16 == 32
    assert driver.choices[1, 2].tokens == expected_completion([*known, 1, 2, 3], 9, 8)


@pytest.mark.parametrize("block_size", [1, 16])
def test_drafts_preempt_no_sequence(block_size: int) -> None:
    # Both requests fit exactly, without a token to spare.
    driver = EngineDriver(num_blocks=64 // block_size, block_size=block_size, depth=2, num_draft_tokens=8)
    driver.submit(1, PROMPT[:8], max_tokens=24)
    driver.submit(2, PROMPT[1:9], max_tokens=24)
    driver.run()
    counters = driver.engine.state().counters
    assert counters.num_preemptions == 0
    assert counters.num_accepted_tokens > 0


def test_drafts_use_what_prompts_leave_of_a_steps_budget() -> None:
    policy = SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=16, enable_mixed_steps=True)
    driver = EngineDriver(policy=policy, num_draft_tokens=8)
    driver.submit(1, PROMPT[:4], max_tokens=40)
    driver.step()
    driver.submit(2, PROMPT, max_tokens=2)
    driver.step()
    assert counts_of_last(driver) == [9]
    # 15 of the next step's 16 tokens belong to the prompt.
    driver.step()
    assert counts_of_last(driver) is None
    driver.run()
    assert driver.choices[1, 1].tokens == expected_completion(PROMPT[:4], 0, 40)
    assert driver.choices[1, 2].tokens == expected_completion(PROMPT, 0, 2)


def test_a_worker_that_drafts_too_many_tokens_is_refused() -> None:
    driver = EngineDriver(attach=False)
    actions = driver.on_event(attached(worker_facts(num_draft_tokens=MAX_DRAFT_TOKENS + 1)))
    assert [type(action) for action in actions] == [DropDomain]
    assert not driver.engine.is_ready
    assert driver.engine.state().counters.num_unfit_workers == 1


@pytest.mark.parametrize("change", ["too many", "none", "of no draft"])
def test_an_impossible_number_of_tokens_ends_the_epoch(change: str) -> None:
    driver = EngineDriver(num_draft_tokens=2)
    driver.submit(1, PROMPT, max_tokens=20)
    driver.step()
    result = driver.worker.run(driver.sent.pop(0))
    token_ids = {"too many": [5, 6, 7, 8], "none": [], "of no draft": [5, 6, VOCABULARY]}[change]
    counts = np.array([len(token_ids)], np.int32)
    tokens = list(driver.choices[1, 1].tokens)
    actions = driver.return_result(replace(result, token_ids=np.array(token_ids, np.int32), counts=counts))
    assert [type(action) for action in actions] == [DropDomain, Deliver]
    assert driver.choices[1, 1].tokens == tokens
